"""The disk tier below the arena: what is spilled, what comes back, and what damage costs."""

import asyncio
import logging
import os
from pathlib import Path

import pytest

from services.kvstore.disk_space import DiskSpace
from services.kvstore.holder import Holder
from services.kvstore.metrics import KvStoreCollector
from services.kvstore.server import Server
from services.settings import SettingsError
from tests.kvstore.disk_rig import MIB, Rig, contents, flip, modes, tiers, wait_until, write_files

MANY = [b"context %d" % number for number in range(64)]
CHAIN = [b"block %d" % number for number in range(40)]


async def fill(rig: Rig) -> None:
    """Twice what the arena holds, each its own context."""
    for key in MANY:
        await rig.keep(key)


async def chain(rig: Rig, keys: list[bytes]) -> None:
    for parent, key in zip([b"", *keys], keys, strict=False):
        await rig.keep(key, parent)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "made" / "kv"


async def test_what_the_arena_evicts_comes_back_from_disk(folder: Path) -> None:
    async with tiers(folder) as rig:
        await fill(rig)
        assert rig.hits(*MANY) == MANY
        assert rig.store.counts().evictions > 0
        for key in MANY[:8]:
            assert await rig.read(key) == (1, (0,))
            assert await rig.read(key) == (1, ())
        assert rig.disk.reloaded == 8
        assert rig.store.counts().leased == 0
        assert modes(folder) == {0o700, 0o600}


async def test_half_of_the_arena_is_always_on_disk_and_the_rest_is_not_written(folder: Path) -> None:
    async with tiers(folder) as rig:
        for key in MANY[:16]:
            rig.put(key)
        await rig.caught_up()
        assert rig.disk.spilled == 0
        for key in MANY[16:20]:
            await rig.keep(key)
        assert 4 <= rig.disk.spilled <= 6
        assert rig.store.counts().evictions == 0


async def test_a_chain_lies_partly_here_partly_there(folder: Path) -> None:
    async with tiers(folder) as rig:
        await chain(rig, CHAIN)
        in_memory = rig.store.counts().objects
        assert in_memory == 32
        assert await rig.read(*CHAIN[:24], b"never seen", CHAIN[24]) == (24, tuple(range(8)))


async def test_a_chain_longer_than_the_arena_is_leased_as_far_as_it_fits(folder: Path) -> None:
    async with tiers(folder) as rig:
        await chain(rig, CHAIN)
        lease, extents, _ = await rig.lease(*CHAIN)
        assert len(extents) == 32
        assert not rig.put(b"another one")
        rig.store.release(rig.holder, lease)
        assert rig.put(b"another one")


async def test_two_leases_at_once_read_an_object_once(folder: Path) -> None:
    async with tiers(folder) as rig:
        await fill(rig)
        first, second = await asyncio.gather(rig.lease(*MANY[:3]), rig.lease(*MANY[1:4]))
        assert (len(first[1]), len(second[1])) == (3, 3)
        assert (first[2], second[2]) == ((0, 1, 2), (0, 1, 2))
        assert rig.disk.reloaded == 4
        assert rig.store.counts().leased == 4
        rig.store.release(rig.holder, first[0])
        assert rig.store.counts().leased == 3
        rig.store.release(rig.holder, second[0])
        assert rig.store.counts().leased == 0


async def test_a_lease_that_is_called_off_leaves_nothing_behind(folder: Path) -> None:
    async with tiers(folder) as rig:
        await fill(rig)
        for rounds in range(4):
            other = Holder("gone", "model")
            wanted = MANY[8 * rounds : 8 * rounds + 8]
            task = asyncio.create_task(rig.store.lease_from_disk(other, wanted))
            for _ in range(rounds):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            rig.store.end(other)
            await wait_until(lambda: rig.store.counts().leased == rig.store.counts().reserved == 0)
        assert (await rig.read(*MANY[:32]))[0] == 32


async def test_what_is_written_at_the_end_is_there_at_the_next_start(folder: Path) -> None:
    async with tiers(folder) as rig:
        await chain(rig, CHAIN[:10])
        assert rig.disk.objects == 0
    async with tiers(folder) as rig:
        assert rig.disk.objects == 10
        assert await rig.read(*CHAIN[:11]) == (10, tuple(range(10)))
        assert rig.disk.torn == 0


async def test_another_models_contexts_are_none_of_ours(folder: Path) -> None:
    async with tiers(folder) as rig:
        await fill(rig)
    async with tiers(folder) as rig:
        rig.holder = Holder("two", "other model")
        assert rig.hits(*MANY) == []
        assert await rig.read(*MANY) == (0, ())
        assert rig.disk.objects == 64


async def test_what_is_told_to_prometheus(folder: Path, tmp_path: Path) -> None:
    async with tiers(folder) as rig:
        await fill(rig)
        await rig.read(MANY[0])
        server = Server(str(tmp_path / "kv.sock"), rig.arena, rig.store)
        values = {
            sample.name: sample.value
            for metric in KvStoreCollector(rig.store, server).collect()
            for sample in metric.samples
        }
        server.close()
        disk = rig.disk
    assert values["samovar_kvstore_disk_bytes"] == 16 * MIB
    assert values["samovar_kvstore_disk_used_bytes"] == disk.used_bytes > 40 * 32_000
    assert values["samovar_kvstore_disk_objects"] == values["samovar_kvstore_spilled_total"] == disk.objects
    assert values["samovar_kvstore_reloaded_total"] == 1
    assert values["samovar_kvstore_torn_total"] == values["samovar_kvstore_disk_evictions_total"] == 0
    assert values["samovar_kvstore_unsaved_bytes"] <= MIB // 2


async def test_chances_outlive_the_process(folder: Path) -> None:
    async with tiers(folder) as rig:
        for key in MANY[:15]:
            await rig.keep(key, length=MIB)
        rig.store.weigh([MANY[9]], 1 / 64)
    async with tiers(folder) as rig:
        await rig.keep(b"one more", length=MIB)
        assert rig.hits(*MANY[:15]) == [key for key in MANY[:15] if key != MANY[9]]


async def test_the_disk_gives_up_what_is_worth_least_and_stays_in_its_bounds(folder: Path) -> None:
    async with tiers(folder, arena_bytes=4 * MIB) as rig:
        for number, key in enumerate(MANY[:40]):
            await rig.keep(key, length=MIB, chance=1 / 32 if number < 10 else 1.0)
            assert rig.disk_files <= 16 * MIB
        assert rig.disk.used_bytes <= rig.disk.disk_bytes == 16 * MIB
        assert rig.disk.evictions > 0
        kept = rig.hits(*MANY[:40])
        assert kept == MANY[40 - len(kept) : 40]
        assert len(kept) >= 16


async def test_a_journal_that_is_full_of_the_past_is_rewritten(folder: Path) -> None:
    async with tiers(folder) as rig:
        for number in range(2500):
            rig.put(b"x" * 200 + b"%d" % number, length=4096)
            if number % 50 == 0:
                await rig.caught_up()
        assert rig.disk.spilled > 1500
        assert (folder / "samovar-kv-1.journal").stat().st_size <= 16 * MIB // 64
        kept = rig.disk.objects
    async with tiers(folder) as rig:
        assert rig.disk.torn == 0
        assert rig.disk.objects >= kept


async def test_drop_forgets_on_disk_too(folder: Path) -> None:
    async with tiers(folder) as rig:
        await fill(rig)
        assert rig.store.drop(rig.holder, [MANY[0], MANY[63], b"unknown"]) == 2
        assert rig.hits(MANY[0], MANY[63]) == []
    async with tiers(folder) as rig:
        assert rig.hits(*MANY) == MANY[1:63]
        assert rig.store.drop(Holder("two", "other model"), []) == 0
        assert rig.store.drop(rig.holder, []) == 62
        assert rig.hits(*MANY) == []
        assert rig.disk.objects == 0


async def test_a_drop_while_it_is_read_back_counts(folder: Path) -> None:
    async with tiers(folder) as rig:
        await fill(rig)
    late = Rig(folder)
    late.store.start()
    late.store.drop(late.holder, MANY[:5])
    assert late.hits(*MANY) == []
    await wait_until(lambda: late.store.ready)
    assert late.hits(*MANY) == MANY[5:]
    await late.store.close(1)
    late.arena.close()


async def test_a_drop_while_it_is_read_is_a_miss(folder: Path) -> None:
    async with tiers(folder) as rig:
        await fill(rig)
        task = asyncio.create_task(rig.read(*MANY[:3]))
        await asyncio.sleep(0)
        rig.store.drop(rig.holder, [MANY[1]])
        assert (await task)[0] == 1
        assert rig.hits(*MANY[:3]) == [MANY[0], MANY[2]]
        assert rig.disk.torn == 0


async def test_a_flipped_bit_is_a_miss_and_is_counted(folder: Path) -> None:
    async with tiers(folder) as rig:
        await chain(rig, CHAIN[:10])
    flip(folder / "samovar-kv-1.blocks", CHAIN[4] * 100)
    async with tiers(folder) as rig:
        assert rig.hits(*CHAIN) == CHAIN[:10]
        assert await rig.read(*CHAIN[:10]) == (4, (0, 1, 2, 3))
        assert rig.disk.torn == 1
        assert rig.hits(*CHAIN) == CHAIN[:4] + CHAIN[5:10]
        await rig.keep(CHAIN[4], CHAIN[3])
        assert (await rig.read(*CHAIN[:10]))[0] == 10
        assert rig.store.counts().reserved == 0
    async with tiers(folder) as rig:
        assert (await rig.read(*CHAIN[:10]))[0] == 10


async def test_a_data_file_that_lost_its_end(folder: Path) -> None:
    async with tiers(folder) as rig:
        await chain(rig, CHAIN[:10])
    os.truncate(folder / "samovar-kv-1.blocks", 3 * 32_768 + 5)
    async with tiers(folder) as rig:
        assert rig.disk.torn == 7
        assert rig.hits(*CHAIN) == CHAIN[:3]
        os.truncate(rig.blocks, 5)  # under our feet
        assert await rig.read(*CHAIN[:3]) == (0, ())
        assert rig.disk.torn == 10


async def test_a_journal_that_lost_its_end(folder: Path) -> None:
    async with tiers(folder) as rig:
        await chain(rig, CHAIN[:10])
    journal = folder / "samovar-kv-1.journal"
    os.truncate(journal, journal.stat().st_size - 3)
    async with tiers(folder) as rig:
        assert (rig.disk.torn, rig.disk.objects) == (1, 9)
        assert await rig.read(*CHAIN[:10]) == (9, tuple(range(9)))


async def test_files_of_another_version_are_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    strange = {"samovar-kv-9.blocks": b"from the future", "samovar-kv-1.journal": b"what is this"}
    write_files(folder, strange)
    with caplog.at_level(logging.WARNING):
        async with tiers(folder) as rig:
            await fill(rig)
    assert set(strange.values()) <= contents(folder)
    assert "samovar-kv-9.blocks is of another version" in caplog.text
    assert "set aside" in caplog.text


async def test_less_room_than_before(folder: Path) -> None:
    async with tiers(folder, disk_bytes=32 * MIB) as rig:
        for key in MANY[:24]:
            await rig.keep(key, length=MIB)
    async with tiers(folder, disk_bytes=16 * MIB) as rig:
        assert rig.disk_files <= 16 * MIB
        kept = rig.hits(*MANY)
        assert len(kept) == 15
        for key in kept:
            assert await rig.read(key) == (1, (0,))


async def test_a_context_that_is_weighed_goes_first_from_both_tiers(folder: Path) -> None:
    async with tiers(folder, arena_bytes=4 * MIB) as rig:
        for number in range(0, 28, 2):
            await rig.keep(MANY[number], length=MIB // 2)
            await rig.keep(MANY[number + 1], MANY[number], length=MIB // 2)
        assert rig.hits(*MANY[:28]) == MANY[:28]
        assert rig.store.weigh([MANY[9]], 1 / 64) <= 2
        assert rig.store.weigh([MANY[27]], 1 / 64) == 2
        for number in range(28, 40):
            await rig.keep(MANY[number], length=MIB // 2)
        gone = set(MANY[:40]) - set(rig.hits(*MANY[:40]))
        assert {MANY[8], MANY[9], MANY[26], MANY[27]} <= gone
        assert len(gone) <= 10


async def test_one_store_a_folder(folder: Path) -> None:
    async with tiers(folder):
        with pytest.raises(SettingsError, match="another kvstore has this folder"):
            Rig(folder)
    async with tiers(folder):
        pass


@pytest.mark.parametrize("text", ["/var/kv", "/var/kv:", ":4GiB", "/var/kv:lots", "/var/kv:15MiB", "4GiB"])
def test_a_setting_that_cannot_be_read_says_what_to_write(text: str) -> None:
    with pytest.raises(SettingsError, match="write FOLDER:SIZE, like"):
        DiskSpace.parse(text)


def test_a_folder_may_have_a_colon() -> None:
    assert DiskSpace.parse("/a:b/kv:2GiB") == DiskSpace(Path("/a:b/kv"), 2 * 2**30)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SettingsError, match="cannot be used"):
        Rig(tmp_path / "file" / "kv")
