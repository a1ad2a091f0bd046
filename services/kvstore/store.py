"""Both tiers behind one set of calls: the arena, and the disk below it where there is one."""

import asyncio
import time
from collections.abc import Sequence

from services.kvstore.arena import Arena
from services.kvstore.counts import Counts, DiskCounts
from services.kvstore.disk import Disk
from services.kvstore.disk_space import DiskSpace
from services.kvstore.entries import check_chance
from services.kvstore.holder import Holder
from services.kvstore.index import GRACE, Index
from services.kvstore.reload import Reload
from services.kvstore.spill import Spill
from services.protocol.kv import Entry, Extent, Key, KeyState


class _DiskTier:
    def __init__(self, space: DiskSpace, arena: Arena, memory: Index) -> None:
        def lost(key: Key) -> None:
            stored = memory.find(key)
            if stored is not None:
                memory.mark(stored, saved=False)

        self.disk = Disk(space, arena, lost)
        self.spill = Spill(memory, arena.size, self.disk)
        self.reload = Reload(memory, self.disk)


class Store:
    """What connections call. The contracts are those of Index; here is only what the disk adds to them."""

    def __init__(self, arena: Arena, space: DiskSpace | None = None, grace: float = GRACE) -> None:
        """Raises SettingsError when the disk's folder cannot be used."""
        self._memory = Index(arena.size, grace=grace)
        self._tier = _DiskTier(space, arena, self._memory) if space is not None else None
        self._spilling: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether the disk, where there is one, has been read back."""
        return self._tier is None or self._tier.disk.loaded

    @property
    def grace(self) -> float:
        return self._memory.grace

    def counts(self) -> Counts:
        return self._memory.counts()

    def disk_counts(self) -> DiskCounts | None:
        """None: there is no disk tier."""
        return self._tier.disk.counts() if self._tier is not None else None

    def start(self) -> None:
        """Read the disk back and begin to spill, in the background; until it is read back, what is there is a miss."""
        if self._tier is not None:
            self._spilling = asyncio.create_task(self._tier.spill.run())

    async def close(self, seconds: float) -> None:
        """Write to disk what can be written in `seconds`, most worth first. No connection may be left."""
        if self._tier is None:
            return
        if self._spilling is not None:
            self._tier.spill.stop()
            await self._spilling
        await self._tier.reload.close()
        await self._tier.spill.drain(seconds)
        await self._tier.disk.close()

    def lookup(self, holder: Holder, keys: Sequence[Key]) -> tuple[KeyState, ...]:
        """What is on disk is a hit too."""
        states = self._memory.lookup(keys)
        if self._tier is None or all(state == "hit" for state in states):
            return states
        has = self._tier.reload.has
        return tuple(
            "hit" if state != "hit" and has(holder, key) else state for key, state in zip(keys, states, strict=True)
        )

    def waits_for_disk(self, holder: Holder, keys: Sequence[Key]) -> bool:
        """Whether a lease of these is for `lease_from_disk`: the disk could add to it."""
        return self._tier is not None and self._tier.reload.helps(holder, keys)

    def lease(self, holder: Holder, keys: Sequence[Key]) -> tuple[int, tuple[tuple[Extent, ...], ...]]:
        """Of what is in the arena."""
        now = time.monotonic()
        if self._tier is not None:
            self._tier.disk.use(keys, now)
        return self._memory.lease(holder, keys, now)

    async def lease_from_disk(
        self, holder: Holder, keys: Sequence[Key]
    ) -> tuple[int, tuple[tuple[Extent, ...], ...], tuple[int, ...]]:
        """A lease as `lease` gives it, and the indices of the keys that were read from disk for it. Takes as long as
        the disk does. May be cancelled, and must be when the holder ends."""
        assert self._tier is not None
        self.settle()
        leased = await self._tier.reload.lease(holder, keys)
        self._tier.disk.use(keys[: len(leased[1])], time.monotonic())
        self._tier.spill.wake()
        return leased

    def reserve(self, holder: Holder, entries: Sequence[Entry]) -> tuple[tuple[tuple[Extent, ...] | None, ...], int]:
        """What is on disk only is reserved like any other: the client has its bytes at hand."""
        return self._memory.reserve(holder, entries, time.monotonic())

    def commit(self, holder: Holder, keys: Sequence[Key]) -> int:
        done = self._memory.commit(holder, keys, time.monotonic())
        if self._tier is not None:
            for key in keys:
                stored = self._memory.find(key)
                if stored is not None and self._tier.disk.find(key) is not None:
                    self._memory.mark(stored, saved=True)
            self._tier.spill.wake()
        return done

    def release(self, holder: Holder, lease: int) -> int:
        return self._memory.release(holder, lease)

    def drop(self, holder: Holder, keys: Sequence[Key]) -> int:
        """Forgets what is on disk as well. Returns how many objects were forgotten, in whatever tier."""
        if self._tier is None:
            return self._memory.drop(holder, keys)
        disk = self._tier.disk
        there = dict.fromkeys(keys) if keys else disk.keys_of(holder.fingerprint)
        only_there = sum(self._memory.find(key) is None and disk.find(key) is not None for key in there)
        done = self._memory.drop(holder, keys)
        disk.drop(holder.fingerprint, keys)
        self._tier.spill.wake()
        return done + only_there

    def weigh(self, keys: Sequence[Key], chance: float) -> int:
        """Raises BadEntry. Returns how many objects of the arena it applied to."""
        check_chance(chance)
        weighed = self._memory.weigh(keys, chance)
        if self._tier is None:
            return len(weighed)
        # What of the context lies before a gap in the arena is known by the disk.
        behind_gaps = self._tier.disk.weigh(keys, chance) - weighed
        return len(weighed) + self._memory.weigh_each(behind_gaps, chance)

    def end(self, holder: Holder) -> None:
        self._memory.end(holder, time.monotonic())

    def settle(self) -> None:
        self._memory.settle(time.monotonic())
