"""Both tiers in this process, over a real memfd and a real folder."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from services.kvstore.arena import Arena
from services.kvstore.disk import DiskCounts
from services.kvstore.disk_space import DiskSpace
from services.kvstore.holder import Holder
from services.kvstore.store import Store
from services.protocol.kv import Entry, Extent

MIB = 2**20
SECONDS = 20


def content_of(key: bytes, length: int) -> bytes:
    return (key * (length // len(key) + 1))[:length]


async def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


def modes(folder: Path) -> set[int]:
    """Permissions of the folder and of all files in it."""
    return {path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}


def contents(folder: Path) -> set[bytes]:
    return {path.read_bytes() for path in folder.iterdir()}


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def flip(path: Path, within: bytes) -> None:
    """Change one bit in the midst of where these bytes are."""
    content = bytearray(path.read_bytes())
    content[content.index(within) + len(within) // 2] ^= 4
    path.write_bytes(content)


class Rig:
    def __init__(self, folder: Path, arena_bytes: int = MIB, disk_bytes: int = 16 * MIB) -> None:
        self.folder = folder
        self.arena = Arena(arena_bytes)
        self.store = Store(self.arena, DiskSpace(folder, disk_bytes), grace=0)
        self.holder = Holder("one", "model")

    @property
    def disk(self) -> DiskCounts:
        counts = self.store.disk_counts()
        assert counts is not None
        return counts

    @property
    def disk_files(self) -> int:
        """Bytes of all files in the folder."""
        return sum(path.stat().st_size for path in self.folder.iterdir())

    @property
    def blocks(self) -> Path:
        return self.folder / "samovar-kv-1.blocks"

    def put(
        self, key: bytes, parent: bytes = b"", length: int = 32_000, chance: float = 1.0, cost: float = 1.0
    ) -> bool:
        """Reserve, write, commit. False when there is no room."""
        entry = Entry(key=key, length=length, cost=cost, parent=parent, chance=chance)
        (extents,), full = self.store.reserve(self.holder, [entry])
        if extents is None:
            return not full
        content, position = content_of(key, length), 0
        for extent in extents:
            position += os.pwrite(self.arena.fd, content[position : position + extent.length], extent.offset)
        assert self.store.commit(self.holder, [key]) == 1
        return True

    async def keep(self, key: bytes, parent: bytes = b"", length: int = 32_000, chance: float = 1.0) -> None:
        """Put, and wait until the spilling has caught up."""
        assert self.put(key, parent, length, chance)
        await self.caught_up()

    async def caught_up(self) -> None:
        await wait_until(lambda: self.store.counts().unsaved_bytes <= self.arena.size // 2)

    async def lease(self, *keys: bytes) -> tuple[int, tuple[tuple[Extent, ...], ...], tuple[int, ...]]:
        """As a connection does. What is leased has the right bytes."""
        if self.store.waits_for_disk(self.holder, keys):
            leased = await self.store.lease_from_disk(self.holder, keys)
        else:
            leased = *self.store.lease(self.holder, keys), ()
        for key, extents in zip(keys, leased[1], strict=False):
            content = b"".join(os.pread(self.arena.fd, extent.length, extent.offset) for extent in extents)
            assert content == content_of(key, len(content))
        return leased

    async def read(self, *keys: bytes) -> tuple[int, tuple[int, ...]]:
        """Lease and release: how many of the keys were there, and which of them came from disk."""
        lease, extents, from_disk = await self.lease(*keys)
        self.store.release(self.holder, lease)
        return len(extents), from_disk

    def hits(self, *keys: bytes) -> list[bytes]:
        return [key for key, state in zip(keys, self.store.lookup(self.holder, keys), strict=True) if state == "hit"]


@asynccontextmanager
async def tiers(
    folder: Path, arena_bytes: int = MIB, disk_bytes: int = 16 * MIB, drain: float = SECONDS
) -> AsyncGenerator[Rig]:
    """Read back when entered; what is left is written to disk at the end, for `drain` seconds."""
    rig = Rig(folder, arena_bytes, disk_bytes)
    try:
        rig.store.start()
        await wait_until(lambda: rig.store.ready)
        yield rig
    finally:
        await rig.store.close(drain)
        rig.arena.close()
