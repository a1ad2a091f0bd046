"""The kvstore's calls: length-prefixed msgpack over a Unix socket, one tagged union each way.

A frame is a 4-byte little-endian length and that many bytes. Each call carries a `call` number that its reply
repeats; replies may come in any order. The reply to Hello additionally carries the arena's file descriptor
(SCM_RIGHTS). Everything that a connection holds (leases, reservations) ends with it.

An object's bytes lie in one or more extents of the arena, in order. They are immutable once committed.
"""

from typing import Literal

from msgspec import Struct

Key = bytes
"""A block's chain hash (services.protocol.hashing); a state checkpoint's key adds a suffix, see `state_key`."""

KeyState = Literal["miss", "hit", "pending"]
"""`pending`: reserved by somebody, not yet committed."""

MAX_FRAME = 16 * 2**20


def state_key(prefix: Key, position: int) -> Key:
    """The key of the recurrent-state checkpoint at `position`.

    `prefix` names the exact prefix: its last full block (or the root), extended (`hashing.extend`) by the ids of the
    partial block behind that, where there is one.
    """
    return prefix + b"/state/" + position.to_bytes(8, "little")


class Extent(Struct, frozen=True, array_like=True):
    offset: int
    """Bytes from the arena's start, a multiple of 4096."""
    length: int


class Hello(Struct, frozen=True, kw_only=True, tag="hello"):
    call: int
    client: str
    """Shown in `stat` and in logs."""
    fingerprint: str


class Lookup(Struct, frozen=True, kw_only=True, tag="lookup"):
    """The state of each key. Takes nothing, keeps nothing; does not count as a use."""

    call: int
    keys: tuple[Key, ...]


class Lease(Struct, frozen=True, kw_only=True, tag="lease"):
    """Pin the longest committed prefix of `keys` (a chain in order) and say where it lies. Counts as a use of each.

    A leased object is neither evicted nor moved until Release or the end of the connection.
    """

    call: int
    keys: tuple[Key, ...]
    trace: str = ""
    """A W3C traceparent, where the request is traced."""


class Entry(Struct, frozen=True, kw_only=True):
    key: Key
    length: int
    """Bytes."""
    cost: float
    """Seconds that computing this object again would take: what eviction weighs against its bytes."""
    parent: Key = b""
    """The block before it in its chain. A parent is never evicted while a child of it is kept."""
    chance: float = 1.0
    """That it is asked for again, above 0 and at most 1, as seen at its last use."""


class Reserve(Struct, frozen=True, kw_only=True, tag="reserve"):
    """Ask for room for new objects (a chain in order). The caller writes the bytes, then commits each."""

    call: int
    entries: tuple[Entry, ...]
    trace: str = ""


class Commit(Struct, frozen=True, kw_only=True, tag="commit"):
    """The bytes of these reserved objects are written: they may be leased by anyone."""

    call: int
    keys: tuple[Key, ...]


class Release(Struct, frozen=True, kw_only=True, tag="release"):
    """Give a lease back."""

    call: int
    lease: int


class Drop(Struct, frozen=True, kw_only=True, tag="drop"):
    """Forget objects (and give up reservations): named ones, or all of this connection's fingerprint when `keys` is
    empty. Leased ones go when their last lease ends."""

    call: int
    keys: tuple[Key, ...] = ()


class Weigh(Struct, frozen=True, kw_only=True, tag="weigh"):
    """The chance that these contexts are asked for again is another one now. `keys` name their last objects: the
    chance counts for each of them and for what lies before it, up to where another context parts. Does not count as a
    use; unknown keys are passed over."""

    call: int
    keys: tuple[Key, ...]
    chance: float
    """Above 0 and at most 1."""


class Stat(Struct, frozen=True, kw_only=True, tag="stat"):
    call: int


Call = Hello | Lookup | Lease | Reserve | Commit | Release | Drop | Weigh | Stat


class Welcome(Struct, frozen=True, kw_only=True, tag="welcome"):
    """Reply to Hello; the frame's first byte comes with the arena's descriptor."""

    call: int
    arena_bytes: int
    version: int = 1


class States(Struct, frozen=True, kw_only=True, tag="states"):
    """Reply to Lookup, in the order of the keys."""

    call: int
    states: tuple[KeyState, ...]


class Leased(Struct, frozen=True, kw_only=True, tag="leased"):
    """Reply to Lease: `extents[i]` are the extents of `keys[i]`, for the longest hit prefix only."""

    call: int
    lease: int
    """0 when nothing was hit (then there is nothing to release)."""
    extents: tuple[tuple[Extent, ...], ...]
    from_disk: tuple[int, ...] = ()
    """Indices of the keys that had to be read from the disk for this."""


class Reserved(Struct, frozen=True, kw_only=True, tag="reserved"):
    """Reply to Reserve: the extents to write each entry to; None where the store has it, or somebody is writing it,
    or there is no room for it (`full` counts the latter)."""

    call: int
    extents: tuple[tuple[Extent, ...] | None, ...]
    full: int = 0


class Done(Struct, frozen=True, kw_only=True, tag="done"):
    """Reply to Commit, Release, Drop and Weigh. `count`: objects that it applied to."""

    call: int
    count: int


class StatReply(Struct, frozen=True, kw_only=True, tag="stat_reply"):
    call: int
    arena_bytes: int
    used_bytes: int
    """Of committed and reserved objects, rounded up to the allocation unit."""
    objects: int
    reserved: int
    leased: int
    hits: int
    """Keys leased since the start."""
    misses: int
    """Keys asked for in Lease and not there, since the start."""
    evictions: int
    clients: tuple[str, ...]
    disk_bytes: int = 0
    """Room for objects on disk; 0: there is no disk tier."""
    disk_used_bytes: int = 0
    disk_objects: int = 0
    spilled: int = 0
    """Objects written to disk since the start."""
    reloaded: int = 0
    """Objects read back from disk since the start."""
    torn: int = 0
    """Objects on disk that were found damaged, since the start."""


class Fault(Struct, frozen=True, kw_only=True, tag="fault"):
    """The call could not be understood or carried out; the connection stays usable."""

    call: int
    message: str


Reply = Welcome | States | Leased | Reserved | Done | StatReply | Fault
