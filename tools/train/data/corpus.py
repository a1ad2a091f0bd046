"""Which files become training text."""

import hashlib
import random
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.train.data.page_text import read_text

SKIPPED_FOLDERS = re.compile(
    r"(^|/)(tests?|locale|_vendor|lib2to3|idlelib|encodings|__pycache__|site-packages|dist-packages)/"
)
HELD_OUT_ONE_IN = 50


@dataclass(frozen=True, slots=True)
class Selection:
    """What is taken of a set of folders. Sizes in characters."""

    suffixes: tuple[str, ...]
    file_characters: int
    """A longer file is cut."""
    group_characters: int
    """Of one top folder (or top file): no single package may fill the corpus."""
    total_characters: int
    seed: int
    """Of the order in which files are taken until the total is reached."""


PYTHON = Selection((".py",), 60_000, 1_500_000, 18_000_000, 1)
ENGLISH = Selection((".html", ".rst", ".rst.txt", ".md", ".txt"), 80_000, 6_000_000, 18_000_000, 2)


def is_held_out(text: str) -> bool:
    """Whether a file's text is kept for evaluation: one in fifty, by the hash of its start."""
    return zlib.crc32(text[:500].encode()) % HELD_OUT_ONE_IN == 0


def gather(folders: Sequence[Path], selection: Selection) -> list[str]:
    """The texts of distinct usable files. The same files in the same folders give the same list, wherever the folders
    lie. Raises FileNotFoundError for a folder that is not there."""
    candidates: list[tuple[str, Path, str]] = []
    for index, folder in enumerate(folders):
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder")
        for path in folder.rglob("*"):
            relative = path.relative_to(folder).as_posix()
            if relative.endswith(selection.suffixes) and not SKIPPED_FOLDERS.search(relative) and path.is_file():
                candidates.append((f"{index}/{relative}", path, f"{index}/{relative.split('/')[0]}"))
    candidates.sort()
    random.Random(selection.seed).shuffle(candidates)

    texts: list[str] = []
    seen: set[bytes] = set()
    taken: Counter[str] = Counter()
    for _, path, group in candidates:
        if taken.total() >= selection.total_characters:
            break
        if taken[group] >= selection.group_characters:
            continue
        try:
            text = read_text(path)[: selection.file_characters]
        except OSError:
            continue
        digest = hashlib.sha1(text[:2000].encode()).digest()
        if digest in seen or not is_usable(text):
            continue
        seen.add(digest)
        taken[group] += len(text)
        texts.append(text)
    return texts


def is_usable(text: str) -> bool:
    """Not too short, at most 2% outside ASCII (the vocabulary is small), no line over 2,000 characters (data)."""
    return (
        len(text) >= 200
        and sum(c > "\x7f" for c in text) <= len(text) * 0.02
        and max(map(len, text.splitlines())) <= 2000
    )
