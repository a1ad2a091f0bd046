"""What an unfinished pack run has written, so that the next one goes on from there."""

import fcntl
from pathlib import Path

import msgspec
from msgspec import Struct

from services.engine.model.config import ModelError

FILE = "packing.jsonl"


class Done(Struct, frozen=True):
    """A group that lies in its shard, whole."""

    group: str
    digest: str
    """Of its codes and scales in natural form."""
    squares: tuple[float, float]
    """Sums over (written - source)^2 and source^2."""
    changed: bool
    """Any part of it is in another format than in the source."""


class _Begun(Struct, frozen=True):
    run: str


class Journal:
    """A file of lines; the last one may be torn. Held by one process at a time."""

    def __init__(self, folder: Path, run: str) -> None:
        """`run` names source, recipe and plan. Raises ModelError when the folder belongs to another run, or to another
        process right now."""
        self._path = folder / FILE
        fresh = not self._path.exists()
        self._file = self._path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ModelError(f"{folder}: another process is packing into this folder") from None
        self._file.seek(0)
        lines = self._file.read().split(b"\n")
        whole, torn = lines[:-1], lines[-1]
        self.done: dict[str, Done] = {}
        try:
            if whole and msgspec.json.decode(whole[0], type=_Begun).run != run:
                raise ModelError(
                    f"{folder} holds an unfinished pack of another source or recipe: remove it, or choose another"
                )
            self.done = {entry.group: entry for entry in (msgspec.json.decode(line, type=Done) for line in whole[1:])}
        except msgspec.MsgspecError:
            raise ModelError(f"{self._path} is damaged: remove {folder} and pack again") from None
        if torn:
            self._file.truncate(sum(len(line) + 1 for line in whole))
        if fresh or not whole:
            self._append(_Begun(run))

    def add(self, entry: Done) -> None:
        self._append(entry)
        self.done[entry.group] = entry

    def forget(self) -> None:
        """Start over next time."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Another process may go on."""
        self._file.close()

    def _append(self, entry: Struct) -> None:
        self._file.write(msgspec.json.encode(entry) + b"\n")
        # No fsync: what a crash of the machine loses is found when everything is read again.
        self._file.flush()
