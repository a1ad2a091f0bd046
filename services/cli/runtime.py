"""The folder of one run of `samovar up`: NATS configuration, kvstore socket, state.json. It goes when the run ends."""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO, Self

PREFIX = "samovar-"
LONGEST_SOCKET_PATH = 100
"""Of the 104 bytes (macOS; Linux 108) that a Unix socket's address holds."""


class Runtime:
    """Readable by this user only. A folder left behind by a killed run is removed by the next one."""

    def __init__(self, folder: Path, lock: IO[bytes]) -> None:
        self.folder = folder
        self.kv_socket = folder / "kv.sock"
        self.nats_config = folder / "nats.conf"
        self.state_file = folder / "state.json"
        self._lock = lock
        self._state: dict[str, object] = {}

    @classmethod
    def make(cls) -> Self:
        """Raises OSError."""
        parent = Path(tempfile.gettempdir())
        if len(os.fsencode(parent / f"{PREFIX}12345678" / "kv.sock")) > LONGEST_SOCKET_PATH:
            parent = Path("/tmp")
        _sweep(parent)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock = (folder / "lock.new").open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / "lock.new").rename(folder / "lock")  # never seen without its owner, so never swept
        return cls(folder, lock)

    def note(self, **facts: object) -> None:
        """Write facts into state.json, for whoever wants to find this run's processes and addresses. A full disk
        costs the note, not the run."""
        self._state |= facts
        new = self.state_file.with_suffix(".new")
        with contextlib.suppress(OSError):
            new.write_text(json.dumps(self._state, indent=2) + "\n")
            new.replace(self.state_file)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()


def _sweep(parent: Path) -> None:
    """Remove the folders of runs that were killed: nobody holds their lock."""
    for lock_file in parent.glob(f"{PREFIX}*/lock"):
        with contextlib.suppress(OSError), lock_file.open("rb") as lock:
            if os.fstat(lock.fileno()).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock_file.parent, ignore_errors=True)
