"""The runs of `samovar up` on this machine, found by the folders that they keep."""

import contextlib
import fcntl
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from services.cli.runtime import PREFIX

FALLBACK = Path("/tmp")
"""Where a run keeps its folder if the usual place has too long a name."""


def urls() -> list[str]:
    """Of the gateways of this user's runs, the run started last first."""
    found: dict[Path, tuple[float, str]] = {}
    for parent in {Path(tempfile.gettempdir()), FALLBACK}:
        for folder in parent.glob(f"{PREFIX}*"):
            found |= {folder.resolve(): run for run in _run(folder)}
    return [url for _, url in sorted(found.values(), reverse=True)]


def _run(folder: Path) -> Iterator[tuple[float, str]]:
    """When it began and where it serves; nothing for a folder of another user's or of a run that was killed."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if _held(folder / "lock"):
            state = json.loads((folder / "state.json").read_text())
            yield (folder / "lock").stat().st_mtime, str(state["url"])


def _held(lock_file: Path) -> bool:
    """Raises OSError where there is no lock, or not for us."""
    with lock_file.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
