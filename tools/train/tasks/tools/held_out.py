"""Names and phrasings that no training row shows, chosen by hash: the same ones in every process and version."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

NAMES_ONE_IN = 10
PHRASINGS_ONE_IN = 6


@dataclass(frozen=True, slots=True)
class Holdout:
    """What a generator may draw from: each axis is either the training part or the held-out part, never both."""

    names: bool = False
    """Held-out tool names."""
    phrasings: bool = False
    """Held-out ways to ask."""


TRAINING = Holdout()
UNSEEN_NAMES = Holdout(names=True)
UNSEEN_PHRASINGS = Holdout(phrasings=True)
UNSEEN = Holdout(names=True, phrasings=True)


def is_held_name(name: str) -> bool:
    return checksum(name) % NAMES_ONE_IN == 0


def split(items: Sequence[str], held: bool) -> Sequence[str]:
    """The held-out or the training part of a list of phrasings: neither is empty, together they are the list. One in
    six is held out, at least the one with the lowest hash. Raises ValueError for fewer than two different items."""
    if len(set(items)) < 2:
        raise ValueError(f"cannot split {items!r}")
    lowest = min(items, key=lambda item: (checksum(item), item))
    highest = max(items, key=lambda item: (checksum(item), item))

    def is_held(item: str) -> bool:
        return item != highest and (item == lowest or checksum(item) % PHRASINGS_ONE_IN == 0)

    return [item for item in items if is_held(item) == held]


def checksum(text: str) -> int:
    return zlib.crc32(text.encode())
