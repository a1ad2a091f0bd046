"""The disk tier as the event loop sees it: an index of its own over the data file, all waiting done on threads."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from services.kvstore.arena import Arena
from services.kvstore.counts import DiskCounts
from services.kvstore.disk_files import DiskFiles
from services.kvstore.disk_space import DiskSpace
from services.kvstore.holder import Holder
from services.kvstore.index import Index
from services.kvstore.stored import Stored
from services.protocol.kv import Key
from services.settings import ByteSize

READERS = 4
"""Threads that read: a checksum takes about as long as the read of an NVMe drive."""

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Disk:
    """Which objects are on disk, and their copies there and back. Empty until `load` has returned.

    Objects are evicted by the rule of the arena (see Index). `lost` is told of the key of each object that is here no
    more.
    """

    def __init__(self, space: DiskSpace, arena: Arena, lost: Callable[[Key], None]) -> None:
        """Locks the folder. Raises SettingsError."""
        self.loaded = False
        self._space = space
        self._arena = arena
        self._lost = lost
        self._files = DiskFiles(space)
        self._index = self._new_index(())
        self._holder = Holder("disk", "")
        self._forgotten: list[Key] = []
        """Keys that the journal names and should not."""
        self._early: list[tuple[str, tuple[Key, ...]]] = []
        """Drops that came before it was read back: fingerprint, keys."""
        self._writer = ThreadPoolExecutor(1, "disk-writer")
        self._readers = ThreadPoolExecutor(READERS, "disk-reader")
        self._spilled = self._reloaded = self._torn = 0

    def counts(self) -> DiskCounts:
        """May be called from any thread."""
        counts = self._index.counts()
        return DiskCounts(
            disk_bytes=self._space.size,
            used_bytes=counts.used_bytes + self._space.journal_bytes - self._files.journal_room,
            objects=counts.objects,
            evictions=counts.evictions,
            spilled=self._spilled,
            reloaded=self._reloaded,
            torn=self._torn,
        )

    async def load(self) -> None:
        """Read back what is there. Of a million objects that takes some seconds, on a thread."""
        began = time.monotonic()
        self._index, self._torn = await self._on(self._writer, partial(self._read_back, began))
        self.loaded = True
        for fingerprint, keys in self._early:
            self.drop(fingerprint, keys)
        self._early.clear()
        counts, seconds = self._index.counts(), time.monotonic() - began
        damage = f", {self._torn} damaged" if self._torn else ""
        log.info(
            "disk: %d objects of %.2f GiB in %s, of %s%s, read back in %.2f s",
            counts.objects,
            counts.used_bytes / 2**30,
            self._space.folder,
            ByteSize(self._space.size),
            damage,
            seconds,
        )

    def find(self, key: Key) -> Stored | None:
        """An object that can be read."""
        stored = self._index.find(key)
        return stored if stored is not None and stored.committed else None

    def use(self, keys: Sequence[Key], now: float) -> None:
        self._index.use(keys, now)

    def weigh(self, keys: Sequence[Key], chance: float) -> set[Key]:
        """See Index."""
        return self._index.weigh(keys, chance)

    def keys_of(self, fingerprint: str) -> list[Key]:
        return [stored.key for stored in self._index.objects() if stored.fingerprint == fingerprint]

    def drop(self, fingerprint: str, keys: Sequence[Key]) -> None:
        """Forget objects, all of the fingerprint when `keys` is empty; `flush` makes it durable. What is being written
        is forgotten by whoever writes it, see `write`."""
        if not self.loaded:
            self._early.append((fingerprint, tuple(keys)))
            return
        there = [key for key in keys or self.keys_of(fingerprint) if self.find(key) is not None]
        for key in there:
            self._forgot(key)
        if there:
            self._index.drop(Holder("drop", fingerprint), there)

    @property
    def to_flush(self) -> bool:
        return bool(self._forgotten)

    async def flush(self) -> None:
        """Let the journal forget what was dropped or evicted. Raises OSError; then it is still to be done."""
        await self._write([])

    def admit(self, stored: Stored) -> Stored | None:
        """A reservation here for a committed object of the arena, to be given to `write`; None where it is not worth
        the room. What is evicted for it is gone at once."""
        return self._index.admit(self._holder, stored, stored.used)

    async def write(self, pairs: Sequence[tuple[Stored, Stored]]) -> None:
        """Copy objects of the arena, which are pinned there, to their reservations here. Those that were forgotten
        there meanwhile are forgotten here too. Raises OSError, and then has given up the reservations."""
        try:
            await self._write(pairs)
        except OSError:
            if pairs:
                self._index.drop(self._holder, [copy.key for _, copy in pairs])
            raise
        self._index.commit(self._holder, [copy.key for _, copy in pairs])
        for stored, copy in pairs:
            if not stored.kept:
                self.drop(copy.fingerprint, [copy.key])
        self._spilled += len(pairs)

    async def _write(self, pairs: Sequence[tuple[Stored, Stored]]) -> None:
        forgotten, self._forgotten = self._forgotten, []
        now = time.monotonic()
        try:
            if self._files.journal_room < _journal_need(pairs, forgotten):
                await self._on(self._writer, partial(self._files.rewrite, self._index.objects(), now))
                forgotten = []
            await self._on(self._writer, partial(self._files.write, self._arena.fd, pairs, forgotten, now))
        except OSError:
            self._forgotten = forgotten + self._forgotten
            raise

    def pin(self, source: Stored) -> None:
        """Keep an object of `find` where it is until `read` is over."""
        self._index.pin(source)

    async def read(self, pairs: Sequence[tuple[Stored, Stored]]) -> list[bool]:
        """Copy pinned objects to their reservations in the arena: which are what they were. One that is not, or that
        was dropped meanwhile, is forgotten."""
        try:
            sound = await self._on(self._readers, partial(self._files.read, self._arena.fd, pairs))
        finally:
            for source, _ in pairs:
                self._index.unpin(source)
        torn = [source for (source, _), good in zip(pairs, sound, strict=True) if not good]
        if torn:
            self._torn += len(torn)
            log.warning("%d objects on disk are damaged, and forgotten", len(torn))
            for source in torn:
                if source.kept:
                    self.drop(source.fingerprint, [source.key])
        self._reloaded += sum(sound)
        return [good and source.kept for (source, _), good in zip(pairs, sound, strict=True)]

    async def close(self) -> None:
        """Write the journal anew, with what is known of each object's last use; then close the files. No other call may
        be under way."""
        try:
            if self.loaded:
                await self._on(self._writer, partial(self._files.rewrite, self._index.objects(), time.monotonic()))
        except OSError as error:
            log.warning("the disk's journal stays as it is: %s", error)
        finally:
            self._readers.shutdown()
            self._writer.shutdown()
            self._files.close()

    def _read_back(self, now: float) -> tuple[Index, int]:
        kept = self._files.read_back(now)
        return self._new_index(kept.objects), kept.torn

    def _new_index(self, kept: Sequence[Stored]) -> Index:
        return Index(
            self._space.data_bytes,
            kept=kept,
            most_objects=self._space.most_objects,
            evicted=lambda stored: self._forgot(stored.key),
        )

    def _forgot(self, key: Key) -> None:
        self._forgotten.append(key)
        self._lost(key)

    async def _on(self, threads: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(threads, work)


def _journal_need(pairs: Sequence[tuple[Stored, Stored]], forgotten: Sequence[Key]) -> int:
    """Bytes that these take in the journal at most."""
    need = 64 + sum(8 + len(key) for key in forgotten)
    for _, copy in pairs:
        names = len(copy.key) + len(copy.parent) + len(copy.fingerprint.encode())
        need += 128 + names + 24 * len(copy.extents)
    return need
