"""What the store holds: keys, leases, reservations. No input or output, no clock of its own, one thread."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import isfinite

from services.kvstore.eviction import VictimQueue
from services.kvstore.extents import ExtentAllocator, rounded
from services.kvstore.stored import HALF_LIFE, Stored, density, score
from services.protocol.kv import Entry, Extent, Key, KeyState

MOST_KEY_BYTES = 256
GRACE = 2.0
"""Seconds that the bytes which an ended connection had leased or reserved stay untouched: its process, or a copy that
it started, may be at them for a moment longer. Its keys and its leases are given up at once."""


class BadEntry(ValueError):
    """An entry that cannot be stored, whatever room there is."""


@dataclass(slots=True, eq=False)
class Holder:
    """What one connection holds. Made by the server, kept by the index."""

    name: str
    fingerprint: str
    leases: dict[int, list[Stored]] = field(default_factory=dict)
    reserved: dict[Key, Stored] = field(default_factory=dict)


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


class Index:
    """Objects by key, with two-phase insertion (reserve, commit), leases and eviction.

    Victims are committed objects that no lease pins and that have no kept child, the least score first (see
    `stored.score`). A new object evicts only what scores less than itself, and only if that makes enough room: else
    nothing is evicted and the object is refused. Nobody starves: scores of new objects rise with the clock, so an
    object that costs as much a byte as the others displaces anything used longer ago than just now, and one that costs
    1/R as much displaces what was not used for log2(R) half-lives. What it never displaces is what is in use.

    Times (`now`) are seconds of one monotonic clock.
    """

    def __init__(self, arena_bytes: int, half_life: float = HALF_LIFE, grace: float = GRACE) -> None:
        self.grace = grace
        self._half_life = half_life
        self._allocator = ExtentAllocator(arena_bytes)
        self._objects: dict[Key, Stored] = {}
        self._children: dict[Key, int] = {}
        """Kept objects by their parent's key, whether or not the parent is kept: it may come (back) later."""
        self._victims = VictimQueue()
        self._lease_numbers = count(1)
        self._ended: deque[tuple[float, list[Stored]]] = deque()
        """Objects that ended connections pinned, and when these pins go."""
        self._reserved = self._leased = self._hits = self._misses = self._evictions = 0

    def counts(self) -> Counts:
        """Changes nothing and may be called from any thread, for a picture that may be a call old."""
        return Counts(
            arena_bytes=self._allocator.size,
            used_bytes=self._allocator.used,
            objects=len(self._objects) - self._reserved,
            reserved=self._reserved,
            leased=self._leased,
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
        )

    def lookup(self, keys: Sequence[Key]) -> tuple[KeyState, ...]:
        return tuple(self._state(key) for key in keys)

    def lease(self, holder: Holder, keys: Sequence[Key], now: float) -> tuple[int, tuple[tuple[Extent, ...], ...]]:
        """Pin the longest committed prefix of `keys`. Returns the lease's number, 0 for an empty prefix, and the
        extents of each hit."""
        hits: list[Stored] = []
        for key in keys:
            stored = self._objects.get(key)
            if stored is None or not stored.committed:
                break
            self._use(stored, now)
            self._pin(stored)
            hits.append(stored)
        self._hits += len(hits)
        self._misses += len(keys) - len(hits)
        if not hits:
            return 0, ()
        number = next(self._lease_numbers)
        holder.leases[number] = hits
        return number, tuple(stored.extents for stored in hits)

    def release(self, holder: Holder, lease: int) -> int:
        """Returns how many objects the lease pinned; 0 when it is no lease of this holder."""
        pinned = holder.leases.pop(lease, [])
        for stored in pinned:
            self._unpin(stored)
        return len(pinned)

    def reserve(
        self, holder: Holder, entries: Sequence[Entry], now: float
    ) -> tuple[tuple[tuple[Extent, ...] | None, ...], int]:
        """Make room for new objects. Returns extents for each entry (None: nothing to write), and how many entries
        found no room; an entry whose parent found none is one of these, for nobody could reach it.

        An object that is there already counts as used: its context goes on just now. Raises BadEntry, and then has
        done nothing.
        """
        for entry in entries:
            _check(entry)
        self.settle(now)
        extents: list[tuple[Extent, ...] | None] = []
        refused: set[Key] = set()
        full = 0
        for entry in entries:
            known = self._objects.get(entry.key)
            if known is not None:
                self._use(known, now)
                extents.append(None)
                continue
            stored = None if entry.parent in refused else self._insert(holder, entry, now)
            if stored is None:
                refused.add(entry.key)
                full += 1
                extents.append(None)
            else:
                extents.append(stored.extents)
        return tuple(extents), full

    def commit(self, holder: Holder, keys: Sequence[Key], now: float) -> int:
        """Returns how many of `keys` were reservations of this holder."""
        done = 0
        for key in keys:
            stored = holder.reserved.pop(key, None)
            if stored is None:
                continue
            self._reserved -= 1
            stored.committed = True
            self._use(stored, now)
            self._offer(stored)
            done += 1
        return done

    def drop(self, holder: Holder, keys: Sequence[Key]) -> int:
        """Forget committed objects and this holder's reservations; of its whole fingerprint when `keys` is empty.

        Reservations of others stay: their bytes are being written. The bytes of a leased object stay until its last
        lease ends, but its key is unknown from now on. Returns how many were forgotten.
        """
        if not keys:
            keys = [key for key, stored in self._objects.items() if stored.fingerprint == holder.fingerprint]
        done = 0
        for key in keys:
            stored = self._objects.get(key)
            if stored is None or not (stored.committed or key in holder.reserved):
                continue
            self._remove(holder, stored)
            if not stored.pins:
                self._allocator.release(stored.extents)
            done += 1
        return done

    def end(self, holder: Holder, now: float) -> None:
        """Give up what a connection held; its bytes are not used otherwise until `grace` is over."""
        pinned = [stored for objects in holder.leases.values() for stored in objects]
        for stored in list(holder.reserved.values()):
            self._remove(holder, stored)
            self._pin(stored)
            pinned.append(stored)
        holder.leases.clear()
        if pinned:
            self._ended.append((now + self.grace, pinned))

    def settle(self, now: float) -> None:
        """End the pins of ended connections whose grace is over. `reserve` does so too."""
        while self._ended and self._ended[0][0] <= now:
            for stored in self._ended.popleft()[1]:
                self._unpin(stored)

    def _state(self, key: Key) -> KeyState:
        stored = self._objects.get(key)
        if stored is None:
            return "miss"
        return "hit" if stored.committed else "pending"

    def _use(self, stored: Stored, now: float) -> None:
        stored.score = score(stored.density, now, self._half_life)

    def _pin(self, stored: Stored) -> None:
        stored.pins += 1
        self._leased += stored.pins == 1

    def _unpin(self, stored: Stored) -> None:
        stored.pins -= 1
        if stored.pins:
            return
        self._leased -= 1
        if stored.kept:
            self._offer(stored)
        else:
            self._allocator.release(stored.extents)

    def _insert(self, holder: Holder, entry: Entry, now: float) -> Stored | None:
        """A new reservation, or None when there is no room for it."""
        saved = density(entry.cost, entry.length)
        worth = score(saved, now, self._half_life)
        self._add_child(entry.parent)  # before making room, so that its parent is no victim
        if not self._make_room(rounded(entry.length), worth):
            self._remove_child(entry.parent)
            return None
        extents = self._allocator.allocate(entry.length)
        assert extents is not None
        stored = Stored(
            key=entry.key,
            parent=entry.parent,
            fingerprint=holder.fingerprint,
            length=entry.length,
            density=saved,
            extents=extents,
            score=worth,
        )
        self._objects[entry.key] = holder.reserved[entry.key] = stored
        self._reserved += 1
        return stored

    def _remove(self, holder: Holder, stored: Stored) -> None:
        """Take an object out of the index; its bytes stay taken."""
        if holder.reserved.pop(stored.key, None) is not None:
            self._reserved -= 1
        del self._objects[stored.key]
        stored.kept = False
        self._victims.forget(stored)
        self._remove_child(stored.parent)

    def _make_room(self, size: int, worth: float) -> bool:
        """Have `size` bytes free, by evicting objects worth less than `worth`; none when that would not be enough."""
        if size > self._allocator.size:
            return False
        victims: list[Stored] = []
        room = self._allocator.free
        while room < size:
            victim = self._victims.pop(worth)
            if victim is None:
                for spared in victims:
                    self._add_child(spared.parent)
                    self._victims.push(spared)
                return False
            if self._evictable(victim):
                victims.append(victim)
                room += rounded(victim.length)
                self._remove_child(victim.parent)
        for victim in victims:
            del self._objects[victim.key]
            victim.kept = False
            self._allocator.release(victim.extents)
        self._evictions += len(victims)
        return True

    def _evictable(self, stored: Stored) -> bool:
        return stored.kept and stored.committed and not stored.pins and stored.key not in self._children

    def _offer(self, stored: Stored) -> None:
        if self._evictable(stored):
            self._victims.push(stored)

    def _add_child(self, parent: Key) -> None:
        if parent:
            self._children[parent] = self._children.get(parent, 0) + 1

    def _remove_child(self, parent: Key) -> None:
        if not parent:
            return
        if self._children[parent] > 1:
            self._children[parent] -= 1
            return
        del self._children[parent]
        stored = self._objects.get(parent)
        if stored is not None:
            self._offer(stored)


def _check(entry: Entry) -> None:
    if not 0 < len(entry.key) <= MOST_KEY_BYTES or len(entry.parent) > MOST_KEY_BYTES:
        raise BadEntry(f"a key must have 1 to {MOST_KEY_BYTES} bytes")
    if entry.parent == entry.key:
        raise BadEntry("an object cannot be its own parent")
    if entry.length <= 0:
        raise BadEntry(f"an object of {entry.length} bytes cannot be stored")
    if not isfinite(entry.cost) or entry.cost < 0:
        raise BadEntry(f"a cost must be a number of seconds from 0 on, not {entry.cost}")
