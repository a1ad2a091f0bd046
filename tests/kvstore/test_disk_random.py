"""Both tiers under random calls, restarts and damage: right bytes or a miss, and nothing leaks."""

import asyncio
import random
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvstore.holder import Holder
from tests.kvstore.disk_rig import MIB, Rig, tiers

# A tree of contexts, several times as large as the arena; the disk holds about half of it.
KEYS = [b"%02d" % number * 8 for number in range(48)]
PARENT = {key: KEYS[(number - 1) // 2] if number else b"" for number, key in enumerate(KEYS)}
LENGTH = {key: MIB // 4 * (1 + number % 5) - 99 for number, key in enumerate(KEYS)}
ARENA, DISK = 6 * MIB, 18 * MIB


def chain(key: bytes) -> list[bytes]:
    """From the root to `key`."""
    return [*chain(PARENT[key]), key] if key else []


class Walk:
    """Calls of one life of the store."""

    def __init__(self, rig: Rig, draw: random.Random) -> None:
        self._rig = rig
        self._draw = draw

    def put(self) -> None:
        for key in chain(self._draw.choice(KEYS)):
            if not self._rig.put(key, PARENT[key], LENGTH[key], self._draw.choice((1.0, 0.5, 1 / 64))):
                return

    async def read(self) -> None:
        keys = chain(self._draw.choice(KEYS))
        found = self._rig.hits(*keys)
        hits, from_disk = await self._rig.read(*keys)
        assert set(keys[:hits]) <= set(found) | set(self._rig.hits(*keys))
        assert all(index < hits for index in from_disk)

    async def read_at_once(self) -> None:
        await asyncio.gather(*(self.read() for _ in range(3)))

    async def give_up(self) -> None:
        other = Holder("gone", "model")
        keys = chain(self._draw.choice(KEYS))
        if self._rig.store.waits_for_disk(other, keys):
            task = asyncio.create_task(self._rig.store.lease_from_disk(other, keys))
            await asyncio.wait([task], timeout=self._draw.choice((0, 0, 0.002)))
            task.cancel()
            await asyncio.wait([task])
        self._rig.store.end(other)

    def drop(self) -> None:
        keys = self._draw.sample(KEYS, 2)
        self._rig.store.drop(self._rig.holder, keys)
        assert self._rig.hits(*keys) == []

    def weigh(self) -> None:
        self._rig.store.weigh(self._draw.sample(KEYS, 2), self._draw.choice((1.0, 0.5, 1 / 64)))

    async def step(self) -> None:
        match self._draw.randrange(12):
            case 0 | 1 | 2 | 3:
                self.put()
            case 4 | 5:
                await self._rig.caught_up()
            case 6 | 7:
                await self.read()
            case 8:
                await self.read_at_once()
            case 9:
                await self.give_up()
            case 10:
                self.drop()
            case 11:
                self.weigh()

    async def check(self) -> None:
        """With nothing under way, what is said to be there is."""
        await self._rig.caught_up()
        self._rig.store.settle()
        for key in KEYS:
            keys = chain(key)
            if self._rig.hits(*keys) == keys and sum(LENGTH[k] for k in keys) < ARENA // 2:
                hits, _ = await self._rig.read(*keys)
                assert hits == len(keys)
        assert self._rig.disk.used_bytes <= DISK
        assert self._rig.disk_files <= DISK


def damage(folder: Path, draw: random.Random) -> None:
    path = folder / f"samovar-kv-1.{draw.choice(('blocks', 'journal'))}"
    content = bytearray(path.read_bytes())
    if not content:
        return
    for _ in range(3):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    if draw.random() < 0.3:
        del content[draw.randrange(len(content)) :]
    path.write_bytes(content)


async def live(folder: Path, draw: random.Random, steps: int, sound: bool) -> None:
    async with tiers(folder, ARENA, DISK, drain=draw.choice((0.0, 20.0))) as rig:
        walk = Walk(rig, draw)
        for _ in range(steps):
            await walk.step()
        if sound:
            await walk.check()
            assert rig.disk.torn == 0
    rig.store.settle()
    counts = rig.store.counts()
    assert (counts.reserved, counts.leased) == (0, 0)
    assert rig.store.drop(rig.holder, []) >= counts.objects
    assert rig.store.counts().used_bytes == rig.store.counts().unsaved_bytes == 0


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32))
def test_right_bytes_or_a_miss(seed: int) -> None:
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "kv"
        for _ in range(3):
            asyncio.run(live(folder, draw, 20, sound=True))
        for _ in range(2):
            damage(folder, draw)
            asyncio.run(live(folder, draw, 12, sound=False))
