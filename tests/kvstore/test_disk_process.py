"""The disk tier of a real process: what survives which end, and what a client sees of a slow or a full disk."""

import asyncio
import mmap
import resource
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from services.kvstore.arena import Arena
from services.kvstore.disk_files import DiskFiles
from services.kvstore.disk_space import DiskSpace
from services.kvstore.server import Server
from services.kvstore.store import Store
from services.kvstore.stored import Stored
from services.protocol import kv
from services.protocol.frames import frame
from tests.kvstore.disk_rig import tiers
from tests.kvstore.process import MIB, RawClient, refused, running

KEYS = tuple(b"object %d" % number * 4 for number in range(40))
LENGTH = MIB // 4


def content_of(key: bytes) -> bytes:
    return (key * LENGTH)[:LENGTH]


class Writer(RawClient):
    """Also writes and reads the bytes."""

    def store(self, *keys: bytes) -> None:
        """Each its own context."""
        with mmap.mmap(self.descriptors[0], self.welcome.arena_bytes) as arena:
            for key in keys:
                entry = kv.Entry(key=key, length=LENGTH, cost=1.0)
                (extents,) = self.call(kv.Reserve, entries=(entry,)).extents
                assert extents is not None
                content, position = content_of(key), 0
                for extent in extents:
                    end = extent.offset + extent.length
                    arena[extent.offset : end] = content[position : position + extent.length]
                    position += extent.length
                self.call(kv.Commit, keys=(key,))

    def is_right(self, key: bytes) -> bool:
        """Whether it is there; if so, its bytes are its own."""
        leased = self.call(kv.Lease, keys=(key,))
        if not leased.extents:
            return False
        with mmap.mmap(self.descriptors[0], self.welcome.arena_bytes, prot=mmap.PROT_READ) as arena:
            content = b"".join(arena[e.offset : e.offset + e.length] for e in leased.extents[0])
        assert content == content_of(key)
        self.call(kv.Release, lease=leased.lease)
        return True

    def wait_for(self, *keys: bytes) -> None:
        deadline = time.monotonic() + 20
        while self.states(*keys) != ("hit",) * len(keys):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def test_contexts_outlive_a_restart(socket_path: Path, folder: Path) -> None:
    disk = f"{folder}:32MiB"
    with running(socket_path, "8MiB", SAMOVAR_KV_DISK=disk) as store:
        with Writer(socket_path) as client:
            client.store(*KEYS[:20])
        assert "another kvstore has this folder" in refused(
            folder.with_name("other.sock"), "8MiB", SAMOVAR_KV_DISK=disk
        )
        assert store.stop() == 0
        assert "Traceback" not in store.log
    with running(socket_path, "8MiB", SAMOVAR_KV_DISK=disk) as store, Writer(socket_path) as client:
        client.wait_for(*KEYS[:20])
        assert all(client.is_right(key) for key in KEYS[:20])
        stat = client.call(kv.Stat)
        assert (stat.reloaded, stat.torn, stat.disk_objects, stat.leased) == (20, 0, 20, 0)
        assert 20 * LENGTH <= stat.disk_used_bytes <= stat.disk_bytes == 32 * MIB
        assert store.stop(signal.SIGTERM) == 0


def test_what_was_spilled_outlives_a_kill(socket_path: Path, folder: Path) -> None:
    """Killed while it writes: whatever is said to be there is there, with the right bytes."""
    disk = f"{folder}:32MiB"
    spilled = 0
    for life in range(2):
        with running(socket_path, "8MiB", SAMOVAR_KV_DISK=disk) as store, Writer(socket_path) as client:
            client.store(*KEYS[20 * life : 20 * life + 20])
            deadline = time.monotonic() + 20
            while client.call(kv.Stat).spilled == 0:
                assert time.monotonic() < deadline
            spilled += client.call(kv.Stat).spilled
            store.kill()
    with running(socket_path, "8MiB", SAMOVAR_KV_DISK=disk), Writer(socket_path) as client:
        deadline = time.monotonic() + 20
        while client.call(kv.Stat).disk_objects < spilled:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        there = [key for key in KEYS if client.is_right(key)]
        assert len(there) >= spilled >= 2
        assert client.call(kv.Stat).torn <= 1, "the record that was being written"


def test_a_disk_that_takes_nothing_is_a_smaller_store_and_nothing_else(socket_path: Path, folder: Path) -> None:
    with running(socket_path, "8MiB", SAMOVAR_KV_DISK=f"{folder}:32MiB") as store, Writer(socket_path) as client:
        resource.prlimit(store.process.pid, resource.RLIMIT_FSIZE, (LENGTH, LENGTH))  # as a full disk, but EFBIG
        client.store(*KEYS)
        client.wait_for(*KEYS[30:])
        assert all(client.is_right(key) for key in KEYS[30:])
        stat = client.call(kv.Stat)
        assert stat.disk_objects <= 1
        assert stat.leased == 0
        assert store.stop() == 0
        assert "nothing is written to disk for 60 s" in store.log
        assert "Traceback" not in store.log


async def test_other_calls_are_answered_while_a_lease_waits_for_the_disk(
    socket_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiers(folder) as rig:
        for key in KEYS[:8]:
            await rig.keep(key)
    go = threading.Event()
    read = DiskFiles.read

    def slow(files: DiskFiles, arena: int, pairs: Sequence[tuple[Stored, Stored]]) -> list[bool]:
        assert go.wait(20)
        return read(files, arena, pairs)

    monkeypatch.setattr(DiskFiles, "read", slow)
    arena = Arena(MIB)
    store = Store(arena, DiskSpace(folder, 16 * MIB), grace=0)
    server = Server(str(socket_path), arena, store)
    store.start()
    serving = asyncio.create_task(server.serve())

    def talk() -> kv.Reply:
        rude = RawClient(socket_path)
        with RawClient(socket_path) as client:
            while client.states(*KEYS[:8]) != ("hit",) * 8:
                time.sleep(0.01)
            rude.socket.sendall(frame(kv.Lease(call=77, keys=KEYS[4:8])))
            client.socket.sendall(frame(kv.Lease(call=99, keys=KEYS[:4])))
            while client.call(kv.Stat).reserved < 8:
                pass
            rude.close()
            assert client.states(KEYS[0]) == ("hit",)
            go.set()
            reply = client.reply()
            while (stat := client.call(kv.Stat)).leased != 4 or stat.reserved:
                time.sleep(0.01)
            assert client.call(kv.Release, lease=1).count == 4
            return reply

    leased = await asyncio.to_thread(talk)
    assert isinstance(leased, kv.Leased)
    assert (leased.call, len(leased.extents), leased.from_disk) == (99, 4, (0, 1, 2, 3))
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    server.close()
    await store.close(1)
    assert store.counts().leased == store.counts().reserved == 0
    arena.close()
