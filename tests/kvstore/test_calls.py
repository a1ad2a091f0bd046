"""The protocol over a real socket to a real process."""

import mmap
import os
import time

import msgspec
import pytest

from services.protocol import codec, kv
from services.protocol.frames import frame
from tests.kvstore.process import MIB, RawClient, StoreProcess

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


def test_welcome_brings_the_arena(client: RawClient) -> None:
    assert client.welcome == kv.Welcome(call=1, arena_bytes=64 * MIB, version=1)
    (descriptor,) = client.descriptors
    assert os.fstat(descriptor).st_size == 64 * MIB


def test_bytes_written_through_one_connection_are_read_through_another(client: RawClient, store: StoreProcess) -> None:
    (extents,) = client.reserve(A, length=5000).extents
    assert extents is not None
    assert sum(extent.length for extent in extents) == 5000
    with mmap.mmap(client.descriptors[0], 64 * MIB) as arena:
        for extent in extents:
            arena[extent.offset : extent.offset + extent.length] = b"x" * extent.length
    client.call(kv.Commit, keys=(A,))
    with RawClient(store.path) as other:
        leased = other.call(kv.Lease, keys=(A, B))
        assert leased.extents == (extents,)
        with mmap.mmap(other.descriptors[0], 64 * MIB, prot=mmap.PROT_READ) as arena:
            assert b"".join(arena[e.offset : e.offset + e.length] for e in extents) == b"x" * 5000
        assert other.call(kv.Release, lease=leased.lease) == kv.Done(call=3, count=1)


def test_two_writers_of_one_key(client: RawClient, store: StoreProcess) -> None:
    with RawClient(store.path) as other:
        client.reserve(A)
        assert other.reserve(A) == kv.Reserved(call=2, extents=(None,), full=0)
        assert other.states(A, B) == ("pending", "miss")
        assert other.call(kv.Commit, keys=(A,)).count == 0
        assert client.call(kv.Commit, keys=(A,)).count == 1
        assert other.states(A) == ("hit",)


def test_room_that_there_is_not_is_counted(client: RawClient) -> None:
    reserved = client.reserve(A, B, length=65 * MIB)
    assert (reserved.extents, reserved.full) == ((None, None), 2)


def test_the_end_of_a_connection_ends_its_reservations_and_leases(client: RawClient, store: StoreProcess) -> None:
    client.put(A)
    with RawClient(store.path) as other:
        other.call(kv.Lease, keys=(A,))
        other.reserve(B)
        assert len(client.call(kv.Stat).clients) == 2
        assert client.states(A, B) == ("hit", "pending")
    deadline = time.monotonic() + 20
    while (stat := client.call(kv.Stat)).leased or stat.used_bytes > 4096:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert client.states(A, B) == ("hit", "miss")
    assert (stat.reserved, stat.objects, len(stat.clients)) == (0, 1, 1)


def test_drop_of_a_leased_object(client: RawClient) -> None:
    client.put(A)
    leased = client.call(kv.Lease, keys=(A,))
    assert client.call(kv.Drop, keys=(A,)).count == 1
    assert client.states(A) == ("miss",)
    before = client.call(kv.Stat).leased
    client.call(kv.Release, lease=leased.lease)
    assert client.call(kv.Stat).leased < before


def test_stat_counts_hits_and_misses(client: RawClient) -> None:
    before = client.call(kv.Stat)
    client.put(A, B)
    client.call(kv.Lease, keys=(A, B, C))
    after = client.call(kv.Stat)
    assert (after.hits - before.hits, after.misses - before.misses) == (2, 1)
    assert (after.objects, after.reserved, after.arena_bytes) == (2, 0, 64 * MIB)
    assert after.leased >= 2
    assert after.used_bytes >= 2 * 4096


def test_4096_keys_in_one_lease(client: RawClient) -> None:
    keys = tuple(number.to_bytes(32, "big") for number in range(4096))
    assert client.reserve(*keys).full == 0
    assert client.call(kv.Commit, keys=keys).count == 4096
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        leased = client.call(kv.Lease, keys=keys)
        seconds.append(time.perf_counter() - start)
        assert len(leased.extents) == 4096
        client.call(kv.Release, lease=leased.lease)
    assert min(seconds) < 0.1, "3 to 5 ms where it was measured; this is only against quadratic work"


@pytest.mark.parametrize("payload", [b"", b"\xff" * 100, b"\x93\x01\x02\x03", codec.encode({"type": "dance"})])
def test_garbage_is_a_fault_and_the_connection_goes_on(client: RawClient, payload: bytes) -> None:
    client.socket.sendall(len(payload).to_bytes(4, "little") + payload)
    fault = client.reply()
    assert isinstance(fault, kv.Fault)
    assert fault.call == 0
    assert client.states(A) == ("miss",)


@pytest.mark.parametrize(
    "call",
    [
        {"type": "lease", "call": 77, "keys": "no list"},
        {"type": "reserve", "call": 77, "entries": [{"key": b"k", "length": "long", "cost": 1}]},
        {"type": "commit", "call": 77},
        {"type": "reserve", "call": 77, "entries": [{"key": b"k", "length": -1, "cost": 1}]},
        {"type": "reserve", "call": 77, "entries": [{"key": b"", "length": 1, "cost": 1}]},
        {"type": "reserve", "call": 77, "entries": [{"key": b"k", "length": 1, "cost": float("nan")}]},
        {"type": "hello", "call": 77, "client": "again", "fingerprint": "x"},
    ],
)
def test_a_wrong_call_is_a_fault_with_its_number(client: RawClient, call: dict[str, object]) -> None:
    used = client.call(kv.Stat).used_bytes
    payload = msgspec.msgpack.encode(call)
    client.socket.sendall(len(payload).to_bytes(4, "little") + payload)
    fault = client.reply()
    assert isinstance(fault, kv.Fault)
    assert fault.call == 77
    assert client.call(kv.Stat).used_bytes <= used


def test_nothing_is_answered_before_hello(store: StoreProcess) -> None:
    with RawClient(store.path, hello=False) as stranger:
        fault = stranger.call(kv.Lookup, keys=(A,))
        assert fault == kv.Fault(call=1, message="the first call must be hello")
        assert isinstance(stranger.call(kv.Hello, client="late", fingerprint="x"), kv.Welcome)
        assert len(stranger.descriptors) == 1


def test_calls_may_follow_hello_without_waiting(store: StoreProcess) -> None:
    with RawClient(store.path, hello=False) as hasty:
        hello = kv.Hello(call=1, client="hasty", fingerprint="x")
        hasty.socket.sendall(frame(hello) + frame(kv.Lookup(call=2, keys=(A,))))
        assert isinstance(hasty.reply(), kv.Welcome)
        assert hasty.reply() == kv.States(call=2, states=("miss",))


def test_an_oversized_frame_ends_the_connection_and_nothing_else(client: RawClient, store: StoreProcess) -> None:
    with RawClient(store.path) as loud:
        loud.reserve(A)
        loud.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
        fault = loud.reply()
        assert isinstance(fault, kv.Fault)
        assert "over the limit" in fault.message
        with pytest.raises(EOFError):
            loud.reply()
    assert client.states(A) == ("miss",)


def test_half_a_frame_and_gone(client: RawClient, store: StoreProcess) -> None:
    with RawClient(store.path) as rude:
        rude.reserve(A)
        rude.socket.sendall(frame(kv.Commit(call=9, keys=(A,)))[:-1])
    with RawClient(store.path, hello=False) as rude:
        rude.socket.sendall(b"\x01")
    deadline = time.monotonic() + 20
    while client.states(A) != ("miss",):
        assert time.monotonic() < deadline


def test_a_client_that_reads_nothing_holds_up_nobody(client: RawClient, store: StoreProcess) -> None:
    with RawClient(store.path) as deaf:
        deaf.socket.settimeout(0.3)
        calls = frame(kv.Lookup(call=1, keys=(A,) * 10_000)) * 100
        with pytest.raises(TimeoutError):  # its replies pile up until the store reads no more of it
            deaf.socket.sendall(calls)
        assert client.states(A) == ("miss",)
