"""Copies objects of the arena to disk before they are evicted, in the background."""

import asyncio
import logging
import time
from collections.abc import Iterable

from services.kvstore.disk import Disk
from services.kvstore.index import Index
from services.kvstore.stored import Stored

UNSAVED_SHARE = 0.5
"""Of the arena, that may be taken by what is not on disk. So half of it can always be evicted without loss and without
waiting, and what lives for a minute only is not written at all."""
BATCH_BYTES = 64 * 2**20
"""Written and synced at once, at most; they stay pinned in the arena as long."""
BATCH_SHARE = 1 / 16
"""Of the arena, that a batch takes at most."""
OFF_SECONDS = 60.0
"""After the disk refused a write, until the next one is tried."""

log = logging.getLogger(__name__)


class Spill:
    """Least worth first, each context from its beginning on, so that what is on disk can be reached.

    Eviction never waits for it: where room is needed at once, what is not on disk yet is evicted all the same.
    """

    def __init__(self, memory: Index, arena_bytes: int, disk: Disk) -> None:
        self._memory = memory
        self._disk = disk
        self._most_unsaved = int(arena_bytes * UNSAVED_SHARE)
        self._batch = min(BATCH_BYTES, int(arena_bytes * BATCH_SHARE))
        self._work = asyncio.Event()
        self._stopping = False
        self._off_until = 0.0

    def wake(self) -> None:
        """After any call that may have left something to do."""
        if self._disk.to_flush or self._memory.unsaved_bytes > self._most_unsaved:
            self._work.set()

    async def run(self) -> None:
        """Read the disk back, then spill until `stop`."""
        try:
            await self._disk.load()
        except Exception:
            log.exception("the disk tier is not used: it cannot be read")
            return
        self.wake()
        while not self._stopping:
            await self._work.wait()
            self._work.clear()
            try:
                await self._spill()
            except OSError as error:
                log.warning("nothing is written to disk for %.0f s: %s", OFF_SECONDS, error)
                self._pause()
            except Exception:
                log.exception("nothing is written to disk for %.0f s", OFF_SECONDS)
                self._pause()

    def stop(self) -> None:
        """Let `run` return when the write that is under way is over."""
        self._stopping = True
        self._work.set()

    async def drain(self, seconds: float) -> None:
        """After `run`: write what is not on disk yet, most worth first, for so long."""
        if not self._disk.loaded:
            return
        deadline, before = time.monotonic() + seconds, self._disk.counts().spilled
        batch: list[Stored] = []
        size = 0
        try:
            for stored in self._memory.dearest():
                if batch and size + stored.length > self._batch:
                    if time.monotonic() > deadline:
                        break
                    await self._write(batch)
                    batch, size = [], 0
                batch.append(stored)
                size += stored.length
            if time.monotonic() <= deadline:
                await self._write(batch)
            await self._disk.flush()
        except OSError as error:
            log.warning("what is not on disk yet is lost: %s", error)
        log.info(
            "%d objects written to disk before the end, %d bytes left out",
            self._disk.counts().spilled - before,
            self._memory.unsaved_bytes,
        )

    def _pause(self) -> None:
        self._off_until = time.monotonic() + OFF_SECONDS
        asyncio.get_running_loop().call_later(OFF_SECONDS, self._work.set)

    async def _spill(self) -> None:
        """Raises OSError."""
        while not self._stopping and time.monotonic() >= self._off_until:
            if self._memory.unsaved_bytes > self._most_unsaved and (batch := self._memory.coldest(self._batch)):
                await self._write(batch)
            elif self._disk.to_flush:
                await self._disk.flush()
            else:
                return

    async def _write(self, batch: Iterable[Stored]) -> None:
        pairs: list[tuple[Stored, Stored]] = []
        refused: set[bytes] = set()
        for stored in batch:
            if self._disk.find(stored.key) is not None:
                self._memory.mark(stored, saved=True)
            elif stored.parent in refused or (copy := self._disk.admit(stored)) is None:
                refused.add(stored.key)  # worth less than all that is there; nobody could reach what is behind it
            else:
                pairs.append((stored, copy))
        for stored, _ in pairs:
            self._memory.pin(stored)
        try:
            await self._disk.write(pairs)
            for stored, _ in pairs:
                self._memory.mark(stored, saved=True)
        finally:
            for stored, _ in pairs:
                self._memory.unpin(stored)
