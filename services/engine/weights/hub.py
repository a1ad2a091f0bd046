"""Files that came from the hub."""

import hashlib
import os
import re
from pathlib import Path

from services.engine.model.config import ModelError

_SHA256 = re.compile(r"[0-9a-f]{64}")
_AT_ONCE = 2**24


def checksums(path: Path) -> dict[Path, str]:
    """SHA-256 by file, of the large files of a snapshot in the hub's cache, or of one of them: the names of the blobs
    that the links there point to. Empty for what does not come from the hub."""
    found = {}
    for file in sorted(path.iterdir()) if path.is_dir() else (path,):
        blob = Path(os.readlink(file)).name if file.is_symlink() else ""
        if _SHA256.fullmatch(blob):
            found[file] = blob
    return found


def verify(path: Path) -> None:
    """Compare files with their `checksums`. The hub's client looks at the size of a download only, and not at what lies
    in its cache. Raises ModelError naming the first file that differs."""
    for file, wanted in checksums(path).items():
        digest = hashlib.sha256()
        with file.open("rb") as opened:
            while piece := opened.read(_AT_ONCE):
                digest.update(piece)
        if digest.hexdigest() != wanted:
            raise ModelError(f"{file} is damaged: remove {file.resolve()} and download it again")
