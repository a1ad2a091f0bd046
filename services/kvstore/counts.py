"""What the tiers hold and have done, for metrics and `Stat`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    """What the index holds now, and has done since its start."""

    arena_bytes: int
    used_bytes: int
    objects: int
    reserved: int
    leased: int
    """Objects that some lease pins; what ended connections held counts until their grace is over."""
    hits: int
    misses: int
    evictions: int
    unsaved_bytes: int
    """Taken by committed objects that the tier below has not."""


@dataclass(frozen=True, slots=True)
class DiskCounts:
    """What is on disk now, and has been done since the start."""

    disk_bytes: int
    used_bytes: int
    """Of objects, and of the journal."""
    objects: int
    evictions: int
    spilled: int
    reloaded: int
    torn: int
