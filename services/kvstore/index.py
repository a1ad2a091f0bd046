"""What a tier holds: keys, leases, reservations. No input or output, no clock of its own, one thread."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from math import inf

from services.kvstore.counts import Counts
from services.kvstore.entries import check_entry
from services.kvstore.eviction import VictimQueue
from services.kvstore.extents import ExtentAllocator, rounded
from services.kvstore.holder import Holder
from services.kvstore.lineage import Lineage
from services.kvstore.stored import Stored
from services.protocol import worth
from services.protocol.kv import Entry, Extent, Key, KeyState

GRACE = 2.0
"""Seconds that the bytes which an ended connection had leased or reserved stay untouched: its process, or a copy that
it started, may be at them for a moment longer. Its keys and its leases are given up at once."""
RELOAD_RATE = 1e9
"""Bytes a second that the tier below gives back: what an object saves that is there too. A disk half as fast is one
half-life's difference."""


class Index:
    """Objects by key, with two-phase insertion (reserve, commit), leases and eviction.

    Victims are committed objects that no lease pins and that have no kept child, the least score first (see
    `worth.score`). Of what the tier below has too, only the time to bring it back is saved here; and where that tier
    has all that goes on from an object as well, it may go from here before these.
    A new object evicts only what scores less than itself, and only if that makes enough room: else nothing is evicted
    and the object is refused. Nobody starves: scores of new objects rise with the clock, so an object that costs as
    much a byte as the others displaces anything used longer ago than just now, and one that costs 1/R as much, or is R
    times less likely to be asked for, displaces what was not used for log2(R) half-lives. What it never displaces is
    what is in use.

    Times (`now`) are seconds of one monotonic clock.
    """

    def __init__(
        self,
        arena_bytes: int,
        half_life: float = worth.HALF_LIFE,
        grace: float = GRACE,
        *,
        kept: Sequence[Stored] = (),
        most_objects: float = inf,
        evicted: Callable[[Stored], None] | None = None,
    ) -> None:
        """`kept`: what is there from the beginning, committed, in extents that do not overlap. `evicted` is told of
        each object that has just been evicted, and must not call the index."""
        self.grace = grace
        self.unsaved_bytes = 0
        """Of the arena, taken by committed objects that the tier below has not."""
        self._half_life = half_life
        self._allocator = ExtentAllocator(arena_bytes, [extent for stored in kept for extent in stored.extents])
        self._lineage = Lineage()
        self._most_objects = most_objects
        self._evicted = evicted
        self._victims = VictimQueue()
        self._unsaved = VictimQueue()
        """Leaves that the tier below has not."""
        self._lease_numbers = count(1)
        self._ended: deque[tuple[float, list[Stored]]] = deque()
        """Objects that ended connections pinned, and when these pins go."""
        self._reserved = self._leased = self._hits = self._misses = self._evictions = 0
        for stored in kept:
            stored.committed = True
            self._rate(stored)
            self._lineage.expect(stored)
            self._lineage.add(stored)
        for stored in kept:
            self._offer(stored)

    def counts(self) -> Counts:
        """Changes nothing and may be called from any thread, for a picture that may be a call old."""
        return Counts(
            arena_bytes=self._allocator.size,
            used_bytes=self._allocator.used,
            objects=len(self._lineage) - self._reserved,
            reserved=self._reserved,
            leased=self._leased,
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
            unsaved_bytes=self.unsaved_bytes,
        )

    def find(self, key: Key) -> Stored | None:
        """The object, reserved or committed."""
        return self._lineage.find(key)

    def objects(self) -> list[Stored]:
        """All that are committed."""
        return [stored for stored in self._lineage if stored.committed]

    def lookup(self, keys: Sequence[Key]) -> tuple[KeyState, ...]:
        return tuple(self._state(key) for key in keys)

    def lease(self, holder: Holder, keys: Sequence[Key], now: float) -> tuple[int, tuple[tuple[Extent, ...], ...]]:
        """Pin the longest committed prefix of `keys`. Returns the lease's number, 0 for an empty prefix, and the
        extents of each hit."""
        hits: list[Stored] = []
        for key in keys:
            stored = self._lineage.find(key)
            if stored is None or not stored.committed:
                break
            self.pin(stored)
            hits.append(stored)
        return self.hold(holder, hits, len(keys) - len(hits), now)

    def hold(
        self, holder: Holder, hits: list[Stored], misses: int, now: float
    ) -> tuple[int, tuple[tuple[Extent, ...], ...]]:
        """Make a lease of committed objects that are pinned already; their pins go over to it. Returns what `lease`
        does."""
        self._hits += len(hits)
        self._misses += misses
        if not hits:
            return 0, ()
        for stored in hits:
            self._use(stored, now)
        number = next(self._lease_numbers)
        holder.leases[number] = hits
        return number, tuple(stored.extents for stored in hits)

    def release(self, holder: Holder, lease: int) -> int:
        """Returns how many objects the lease pinned; 0 when it is no lease of this holder."""
        pinned = holder.leases.pop(lease, [])
        for stored in pinned:
            self.unpin(stored)
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
            check_entry(entry)
        self.settle(now)
        extents: list[tuple[Extent, ...] | None] = []
        refused: set[Key] = set()
        full = 0
        for entry in entries:
            known = self._lineage.find(entry.key)
            if known is not None:
                known.chance = entry.chance
                self._use(known, now)
                extents.append(None)
                continue
            stored = Stored(entry.key, entry.parent, holder.fingerprint, entry.length, entry.cost, entry.chance, now)
            if entry.parent in refused or not self._insert(holder, stored):
                refused.add(entry.key)
                full += 1
                extents.append(None)
            else:
                extents.append(stored.extents)
        return tuple(extents), full

    def admit(self, holder: Holder, other: Stored, used: float, *, wanted: bool = False) -> Stored | None:
        """A reservation of `holder` for what another tier has and this one has not, last used at `used`; None when
        there is no room for it. One that is `wanted` right now displaces whatever is not in use: its chance has come.
        """
        stored = Stored(
            other.key,
            other.parent,
            other.fingerprint,
            other.length,
            other.cost,
            other.chance,
            used,
            shared=other.shared,
            checksum=other.checksum,
        )
        return stored if self._insert(holder, stored, inf if wanted else None) else None

    def commit(self, holder: Holder, keys: Sequence[Key], now: float | None = None) -> int:
        """Returns how many of `keys` were reservations of this holder. Counts as a use where a time is given."""
        done = 0
        for key in keys:
            stored = holder.reserved.pop(key, None)
            if stored is None:
                continue
            self._reserved -= 1
            stored.committed = True
            self.unsaved_bytes += rounded(stored.length)
            if now is not None:
                self._use(stored, now)
            self._offer(stored)
            done += 1
        return done

    def use(self, keys: Sequence[Key], now: float) -> None:
        """Count as used what is there of `keys`."""
        for key in keys:
            stored = self._lineage.find(key)
            if stored is not None:
                self._use(stored, now)

    def weigh(self, keys: Sequence[Key], chance: float) -> set[Key]:
        """Set the chance of what belongs to the contexts that end with `keys` and to no other one. Returns what that
        is."""
        weighed: set[Key] = set()
        for key in keys:
            for stored in self._lineage.context(key):
                if stored.key in weighed:
                    if not stored.is_state:
                        break
                    continue
                weighed.add(stored.key)
                self._set_chance(stored, chance)
        return weighed

    def weigh_each(self, keys: Iterable[Key], chance: float) -> int:
        """Set the chance of these objects, as far as they are here and not shared. Returns of how many."""
        done = 0
        for key in keys:
            stored = self._lineage.find(key)
            if stored is not None and not stored.shared:
                self._set_chance(stored, chance)
                done += 1
        return done

    def drop(self, holder: Holder, keys: Sequence[Key]) -> int:
        """Forget committed objects and this holder's reservations; of its whole fingerprint when `keys` is empty.

        Reservations of others stay: their bytes are being written. The bytes of a leased object stay until its last
        lease ends, but its key is unknown from now on. Returns how many were forgotten.
        """
        if not keys:
            keys = [stored.key for stored in self._lineage if stored.fingerprint == holder.fingerprint]
        done = 0
        for key in keys:
            stored = self._lineage.find(key)
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
            self.pin(stored)
            pinned.append(stored)
        holder.leases.clear()
        if pinned:
            self._ended.append((now + self.grace, pinned))

    def settle(self, now: float) -> None:
        """End the pins of ended connections whose grace is over. `reserve` does so too."""
        while self._ended and self._ended[0][0] <= now:
            for stored in self._ended.popleft()[1]:
                self.unpin(stored)

    def pin(self, stored: Stored) -> None:
        """Keep an object's bytes where they are until `unpin`."""
        stored.pins += 1
        self._leased += stored.pins == 1

    def unpin(self, stored: Stored) -> None:
        stored.pins -= 1
        if stored.pins:
            return
        self._leased -= 1
        if stored.kept:
            self._offer(stored)
        else:
            self._allocator.release(stored.extents)

    def mark(self, stored: Stored, saved: bool) -> None:
        """Say whether the tier below has an object too. Passes over one that is not committed (any more)."""
        if stored.saved == saved or not (stored.kept and stored.committed):
            return
        stored.saved = saved
        self._rate(stored)
        self._victims.fell(stored)
        self.unsaved_bytes += -rounded(stored.length) if saved else rounded(stored.length)
        if saved:
            self._unsaved.forget(stored)
            self._offer_parent(self._lineage.find(stored.parent))
        self._offer(stored)

    def coldest(self, most: int) -> list[Stored]:
        """Committed objects that are not saved, the least score first, each behind what lies before it: `most` bytes
        of them, at least one. Those that the caller does not `mark` come again only after their next use."""
        picked: dict[Stored, None] = {}
        size = 0
        while (leaf := self._unsaved.pop(inf)) is not None:
            for stored in self._lineage.unsaved_path(leaf):
                if stored in picked:
                    continue
                if picked and size + stored.length > most:
                    self._unsaved.push(leaf)
                    return list(picked)
                picked[stored] = None
                size += stored.length
        return list(picked)

    def dearest(self) -> Iterator[Stored]:
        """All committed objects that are not saved, the greatest score first, each behind what lies before it. To be
        used up while no other call changes what is kept."""
        picked: set[Stored] = set()
        waiting = [stored for stored in self._lineage if stored.committed and not stored.saved]
        for best in sorted(waiting, key=lambda stored: -stored.score):
            if best not in picked:
                path = [stored for stored in self._lineage.unsaved_path(best) if stored not in picked]
                picked.update(path)
                yield from path

    def _state(self, key: Key) -> KeyState:
        stored = self._lineage.find(key)
        if stored is None:
            return "miss"
        return "hit" if stored.committed else "pending"

    def _use(self, stored: Stored, now: float) -> None:
        stored.used = now
        self._rate(stored)
        self._victims.fell(stored)  # where its chance came down with this use
        self._unsaved.fell(stored)

    def _set_chance(self, stored: Stored, chance: float) -> None:
        stored.chance = chance
        self._rate(stored)
        self._victims.fell(stored)
        self._unsaved.fell(stored)

    def _rate(self, stored: Stored) -> None:
        chance = worth.SHARED if stored.shared else stored.chance
        seconds = stored.cost
        if stored.saved:
            seconds = min(seconds, stored.length / RELOAD_RATE)
        stored.score = worth.score(worth.density(seconds, stored.length), chance, stored.used, self._half_life)

    def _insert(self, holder: Holder, stored: Stored, below: float | None = None) -> bool:
        """Make it a reservation, if there is room for it: what scores less than `below`, or else than itself, goes."""
        self._rate(stored)
        self._lineage.expect(stored)  # before making room, so that its parent is no victim
        if not self._make_room(rounded(stored.length), stored.score if below is None else below):
            self._disown(stored)
            return False
        extents = self._allocator.allocate(stored.length)
        assert extents is not None
        stored.extents = extents
        self._lineage.add(stored)
        for key in (stored.key, stored.parent):
            self._share(key)
        holder.reserved[stored.key] = stored
        self._reserved += 1
        return True

    def _share(self, key: Key) -> None:
        stored = self._lineage.find(key)
        if stored is not None and not stored.shared and self._lineage.parted(key):
            stored.shared = True
            self._rate(stored)

    def _remove(self, holder: Holder, stored: Stored) -> None:
        """Take an object out of the index; its bytes stay taken."""
        if holder.reserved.pop(stored.key, None) is not None:
            self._reserved -= 1
        self._forget(stored)
        self._offer_parent(self._lineage.remove(stored))

    def _forget(self, stored: Stored) -> None:
        if stored.committed and not stored.saved:
            self.unsaved_bytes -= rounded(stored.length)
        stored.kept = False
        self._victims.forget(stored)
        self._unsaved.forget(stored)

    def _make_room(self, size: int, below: float) -> bool:
        """Have `size` bytes free and room for one object more, by evicting objects that score less than `below`; none
        when that would not be enough."""
        if size > self._allocator.size:
            return False
        victims: dict[Stored, None] = {}
        room = self._allocator.free
        while room < size or len(self._lineage) - len(victims) >= self._most_objects:
            victim = self._victims.pop(below)
            if victim is None:
                for spared in victims:
                    self._lineage.expect(spared)
                    self._victims.push(spared)
                return False
            if victim not in victims and self._evictable(victim):  # offered again when its last child became one
                victims[victim] = None
                room += rounded(victim.length)
                self._disown(victim)
        for victim in victims:
            self._lineage.discard(victim)
            self._forget(victim)
            self._allocator.release(victim.extents)
            if self._evicted is not None:
                self._evicted(victim)
        self._evictions += len(victims)
        return True

    def _evictable(self, stored: Stored) -> bool:
        return stored.kept and stored.committed and not stored.pins and self._lineage.spares(stored)

    def _offer(self, stored: Stored) -> None:
        if self._evictable(stored):
            self._victims.push(stored)
            if not stored.saved:
                self._unsaved.push(stored)

    def _disown(self, stored: Stored) -> None:
        self._offer_parent(self._lineage.disown(stored))

    def _offer_parent(self, parent: Stored | None) -> None:
        if parent is not None:
            self._offer(parent)
