"""Leases of what lies partly on disk: brings it to the arena first."""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from services.kvstore.disk import READERS, Disk
from services.kvstore.holder import Holder
from services.kvstore.index import Index
from services.kvstore.stored import Stored
from services.protocol.kv import Extent, Key

BATCH_BYTES = 8 * 2**20
"""That one thread reads at once: small objects together, for the way there and back costs 0.1 ms."""
LEAST_PATIENCE = 2.0
MOST_PATIENCE = 20.0
"""Seconds that a lease waits for the disk: between these, as long as computing again would take."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Want:
    """A lease that is being made."""

    pinned: dict[Key, Stored] = field(default_factory=dict)
    """In the arena already, one pin each."""
    behind: list[tuple[int, Key]] = field(default_factory=list)
    """Those of `pinned` that were in the arena from the beginning: their places in the lease, and their keys."""
    waiting: set[Key] = field(default_factory=set)
    """Being read, for this one or for another."""
    failed: bool = False
    """Something of it could not be brought: what lies behind that is not read any more."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while nothing is waited for."""
    closed: bool = False


class Reload:
    """Every read ends by itself, also where its lease has been given up: then it is in the arena, and can be evicted.
    Of leases that want the same object at once, one reads it."""

    def __init__(self, memory: Index, disk: Disk) -> None:
        self._memory = memory
        self._disk = disk
        self._holder = Holder("disk", "")
        """Of the reservations in the arena that are read into."""
        self._reading: dict[Key, list[_Want]] = {}
        self._slots = asyncio.Semaphore(READERS)
        self._tasks: set[asyncio.Task[None]] = set()

    def has(self, holder: Holder, key: Key) -> bool:
        """Whether a lease could bring this object, which is not in the arena. One of another model's engine is none of
        ours, whatever its key."""
        source = self._disk.find(key)
        if source is None or source.fingerprint != holder.fingerprint:
            return False
        return key in self._reading or self._memory.find(key) is None

    def helps(self, holder: Holder, keys: Sequence[Key]) -> bool:
        """Whether the longest prefix of `keys` that can be leased is longer with the disk than without."""
        for key in keys:
            if not self._in_memory(key):
                return self.has(holder, key)
        return False

    async def lease(
        self, holder: Holder, keys: Sequence[Key]
    ) -> tuple[int, tuple[tuple[Extent, ...], ...], tuple[int, ...]]:
        """Pin the longest prefix of `keys` that is or can be brought to the arena within reasonable time. Returns the
        lease, the extents, and the indices of those keys that had to be read. May be cancelled."""
        want = _Want()
        try:
            read: list[int] = []
            seconds = 0.0
            for index, key in enumerate(keys):
                stored = self._memory.find(key)
                if stored is not None and stored.committed:
                    self._take(want, stored)
                    want.behind.append((index, key))
                elif self.has(holder, key):
                    source = self._disk.find(key)
                    assert source is not None
                    seconds += source.cost
                    read.append(index)
                else:
                    break
            with suppress(TimeoutError):
                async with asyncio.timeout(min(max(seconds, LEAST_PATIENCE), MOST_PATIENCE)):
                    await self._bring(want, [(index, keys[index]) for index in read])
            hits: list[Stored] = []
            for key in keys:
                if key not in want.pinned:
                    break
                self._memory.pin(want.pinned[key])
                hits.append(want.pinned[key])
            lease, extents = self._memory.hold(holder, hits, len(keys) - len(hits), time.monotonic())
            return lease, extents, tuple(index for index in read if index < len(hits))
        finally:
            want.closed = True
            for stored in want.pinned.values():
                self._memory.unpin(stored)

    async def close(self) -> None:
        """Wait for the reads that are under way. No lease may be made any more."""
        await asyncio.gather(*self._tasks)

    async def _bring(self, want: _Want, places: Sequence[tuple[int, Key]]) -> None:
        for batch in self._batches(places):
            await self._slots.acquire()
            pairs = self._begin(want, batch)
            if pairs:
                task = asyncio.create_task(self._read(pairs))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                self._slots.release()
            if want.failed:
                break
        while want.waiting:
            want.settled.clear()
            await want.settled.wait()

    def _batches(self, places: Sequence[tuple[int, Key]]) -> Iterator[list[tuple[int, Key]]]:
        batch: list[tuple[int, Key]] = []
        size = 0
        for place, key in places:
            source = self._disk.find(key)
            length = source.length if source is not None else 0
            if batch and size + length > BATCH_BYTES:
                yield batch
                batch, size = [], 0
            batch.append((place, key))
            size += length
        if batch:
            yield batch

    def _begin(self, want: _Want, places: Sequence[tuple[int, Key]]) -> list[tuple[Stored, Stored]]:
        """Pin what is there by now, join the reads of others, make room for the rest: what is to be read."""
        pairs: list[tuple[Stored, Stored]] = []
        for place, key in places:
            stored = self._memory.find(key)
            if stored is not None and stored.committed:
                self._take(want, stored)
                continue
            if key not in self._reading:
                source = self._disk.find(key)
                gone = source is None or stored is not None  # or a client is writing it anew
                copy = None if gone else self._make_room(want, place, source)
                if source is None or copy is None:
                    want.failed = True
                    break
                self._disk.pin(source)
                pairs.append((source, copy))
                self._reading[key] = []
            self._reading[key].append(want)
            want.waiting.add(key)
        return pairs

    def _make_room(self, want: _Want, place: int, source: Stored) -> Stored | None:
        """Room in the arena, if need be that of what lies further behind in the same lease: of a context that the arena
        cannot hold as a whole, the beginning is of use."""
        while True:
            copy = self._memory.admit(self._holder, source, time.monotonic(), wanted=True)
            if copy is not None or not want.behind or want.behind[-1][0] < place:
                return copy
            _, last = want.behind.pop()
            self._memory.unpin(want.pinned.pop(last))

    async def _read(self, pairs: list[tuple[Stored, Stored]]) -> None:
        try:
            sound = await self._disk.read(pairs)
        except Exception:
            log.exception("reading %d objects from disk failed", len(pairs))
            sound = [False] * len(pairs)
        finally:
            self._slots.release()
        for (_, copy), good in zip(pairs, sound, strict=True):
            if good:
                self._memory.commit(self._holder, [copy.key])
                self._memory.mark(copy, saved=True)
            else:
                self._memory.drop(self._holder, [copy.key])
            for want in self._reading.pop(copy.key):
                if good:
                    self._take(want, copy)
                self._arrived(want, copy.key, good)

    def _arrived(self, want: _Want, key: Key, good: bool) -> None:
        want.waiting.discard(key)
        want.failed |= not good
        if not want.waiting:
            want.settled.set()

    def _take(self, want: _Want, stored: Stored) -> None:
        if not want.closed and stored.key not in want.pinned:
            self._memory.pin(stored)
            want.pinned[stored.key] = stored

    def _in_memory(self, key: Key) -> bool:
        stored = self._memory.find(key)
        return stored is not None and stored.committed
