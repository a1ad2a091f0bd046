"""What a client may ask to be stored."""

from math import isfinite

from services.protocol.kv import Entry

MOST_KEY_BYTES = 256


class BadEntry(ValueError):
    """An entry that cannot be stored, whatever room there is."""


def check_entry(entry: Entry) -> None:
    """Raises BadEntry."""
    if not 0 < len(entry.key) <= MOST_KEY_BYTES or len(entry.parent) > MOST_KEY_BYTES:
        raise BadEntry(f"a key must have 1 to {MOST_KEY_BYTES} bytes")
    if entry.parent == entry.key:
        raise BadEntry("an object cannot be its own parent")
    if entry.length <= 0:
        raise BadEntry(f"an object of {entry.length} bytes cannot be stored")
    if not isfinite(entry.cost) or entry.cost < 0:
        raise BadEntry(f"a cost must be a number of seconds from 0 on, not {entry.cost}")
    check_chance(entry.chance)


def check_chance(chance: float) -> None:
    """Raises BadEntry."""
    if not 0 < chance <= 1:
        raise BadEntry(f"a chance must be above 0 and at most 1, not {chance}")
