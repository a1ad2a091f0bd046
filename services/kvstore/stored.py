"""One object of the store."""

import math
from dataclasses import dataclass

from services.protocol.kv import Extent, Key

HALF_LIFE = 600.0
"""Seconds after which an object that nobody uses is worth half. An agent's tool call or its user's next message mostly
comes within minutes, so that within them recomputing cost decides and beyond them recency does."""

LEAST_COST = 1e-6
MOST_COST = 3600.0
"""Seconds that a cost is clamped to, so that no client can make an object that outlives all others for days."""


def density(cost: float, length: int) -> float:
    """log2 of what an object saves a byte: `cost` seconds (clamped), `length` bytes."""
    return math.log2(min(max(cost, LEAST_COST), MOST_COST) / length)


def score(density: float, used: float, half_life: float) -> float:
    """What an object is worth to keep, on a scale that time does not move.

    Its value is the cost that it saves a byte, and the chance that it is asked for again halves every half-life since
    its last use: value(t) = cost / length * 2 ** -((t - used) / half_life). The ratio of two such values does not
    depend on t, so objects may be ordered once, by

        log2(value(t)) + t / half_life = log2(cost / length) + used / half_life,

    and only a use moves one. `used` and `half_life` are in seconds.
    """
    return density + used / half_life


@dataclass(slots=True, eq=False)
class Stored:
    """An object that is reserved or committed, or that was forgotten while something still pins its bytes."""

    key: Key
    parent: Key
    """Empty, or the key of the object before it, which need not be in the store."""
    fingerprint: str
    """Of the client that reserved it."""
    length: int
    """Bytes."""
    density: float
    extents: tuple[Extent, ...]
    score: float
    committed: bool = False
    kept: bool = True
    """In the index: its key can be found, and it counts as a child of its parent."""
    pins: int = 0
    """Leases on it, those of ended connections included until their grace is over."""
    queued: bool = False
    """In the queue of victims."""
