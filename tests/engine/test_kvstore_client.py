"""The engine's kvstore client against the real store process, and against stores that misbehave."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from services.engine.cache.arena import Arena
from services.engine.cache.kv_client import Goal
from services.engine.cache.kvstore_client import KvClient
from services.engine.mailbox import KvAnswer, KvConnected, KvLeased, KvReserved
from services.protocol import codec, kv
from services.protocol.frames import FrameReader, frame
from tests.kvstore.process import RawClient, running

A, B, C, D = b"a" * 32, b"b" * 32, b"c" * 32, b"d" * 32
SECONDS = 20


class Engine:
    """A client and the inbox that its answers go to."""

    def __init__(self, path: Path, name: str = "engine-0", stall: float = 5.0) -> None:
        self.inbox: queue.SimpleQueue[KvAnswer] = queue.SimpleQueue()
        self.client = KvClient(str(path), name, "model", self.inbox.put, stall=stall)

    def next(self) -> KvAnswer:
        return self.inbox.get(timeout=SECONDS)

    def arena(self) -> Arena:
        """Of the next connection; only that may have happened."""
        message = self.next()
        assert isinstance(message, KvConnected)
        return message.arena

    def lease(self, *keys: bytes, tag: int = 1) -> KvLeased:
        self.client.lease(tag, keys)
        answer = self.next()
        assert isinstance(answer, KvLeased)
        assert answer.tag == tag
        return answer

    def find(self, *keys: bytes, goals: Sequence[Goal], tag: int = 3) -> KvLeased:
        self.client.find(tag, keys, goals)
        answer = self.next()
        assert isinstance(answer, KvLeased)
        assert answer.tag == tag
        return answer

    def has(self, key: bytes) -> bool:
        answer = self.find(key, goals=[Goal(1, b"")])
        self.client.release(answer.lease)
        return answer.goal == 0

    def reserve(self, *keys: bytes, tag: int = 2, length: int = 8192) -> KvReserved:
        self.client.reserve(tag, [kv.Entry(key=key, length=length, cost=1.0) for key in keys])
        answer = self.next()
        assert isinstance(answer, KvReserved)
        assert answer.tag == tag
        return answer

    def write(self, key: bytes, content: bytes) -> None:
        reserved = self.reserve(key, length=len(content))
        assert reserved.arena is not None
        (extents,) = reserved.extents
        assert extents is not None
        position = 0
        for extent in extents:
            piece = content[position : position + extent.length]
            reserved.arena.view[extent.offset : extent.offset + extent.length] = piece
            position += extent.length
        self.client.commit([key])


@contextmanager
def engine(path: Path, name: str = "engine-0", stall: float = 5.0) -> Generator[Engine]:
    started = Engine(path, name, stall)
    started.client.start()
    try:
        yield started
    finally:
        started.client.close()
    assert started.inbox.empty()


def read(leased: KvLeased, index: int = 0) -> bytes:
    assert leased.arena is not None
    return b"".join(bytes(leased.arena.view[e.offset : e.offset + e.length]) for e in leased.extents[index])


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.sock"


def test_what_one_process_writes_another_reads(path: Path) -> None:
    writer = """if True:
        import sys
        from pathlib import Path
        from tests.engine.test_kvstore_client import A, B, Engine
        engine = Engine(Path(sys.argv[1]), "writer")
        engine.client.start()
        engine.arena()
        engine.write(A, b"from another process " * 1000)
        engine.write(B, bytes(range(256)) * 64)
        engine.client.close()
    """
    with running(path), engine(path) as reader:
        arena = reader.arena()
        subprocess.run([sys.executable, "-c", writer, str(path)], check=True, timeout=60)
        leased = reader.lease(A, B, C)
        assert leased.arena is arena
        assert reader.client.arena is arena
        assert len(leased.extents) == 2
        assert read(leased, 0) == b"from another process " * 1000
        assert read(leased, 1) == bytes(range(256)) * 64
        reader.client.release(leased.lease)


def test_two_engines_share_and_do_not_write_twice(path: Path) -> None:
    with running(path), engine(path, "one") as one, engine(path, "two") as two, RawClient(path) as observer:
        one.arena()
        two.arena()
        assert one.reserve(A).extents[0] is not None
        assert two.reserve(A, B).extents[0] is None
        assert observer.states(A, B, C) == ("pending", "pending", "miss")
        one.client.commit([A])
        wait_until(lambda: observer.states(A) == ("hit",))
        assert len(two.lease(A).extents) == 1


def test_without_a_store_every_call_is_answered_empty_at_once(path: Path) -> None:
    with engine(path) as away:
        assert not away.client.connected
        assert away.lease(A) == KvLeased(1, None, 0, ())
        assert away.reserve(A, B) == KvReserved(2, None, (None, None))
        assert away.find(A, goals=[Goal(1, B)]) == KvLeased(3, None, 0, ())
        away.client.commit([A])
        away.client.release(7)
        away.client.drop([A])


def test_calls_before_start_and_after_close_are_answered_too(path: Path) -> None:
    lonely = Engine(path)
    lonely.client.lease(1, [A])
    lonely.client.close()
    assert lonely.next() == KvLeased(1, None, 0, ())
    assert lonely.find(A, goals=[Goal(1, B)]) == KvLeased(3, None, 0, ())
    assert lonely.reserve(A) == KvReserved(2, None, (None,))
    lonely.client.close()
    with running(path):
        started = Engine(path)
        started.client.start()
        started.arena()
        started.client.close()
        assert not started.client.connected
        assert started.lease(A) == KvLeased(1, None, 0, ())


def test_a_store_that_comes_later_is_found(path: Path) -> None:
    with engine(path) as early:
        early.lease(A)
        with running(path):
            arena = early.arena()
            assert early.client.arena is arena
            assert arena.size == 64 * 2**20
            early.write(A, b"x" * 10)
            assert read(early.lease(A)) == b"x" * 10


def test_a_find_pins_the_first_goal_that_is_there_whole(path: Path) -> None:
    with running(path), engine(path) as one:
        one.arena()
        one.write(A, b"a" * 10)
        one.write(B, b"b" * 10)
        one.write(C, b"c" * 10)
        one.reserve(D)
        found = one.find(A, D, B, goals=[Goal(3, C), Goal(2, b""), Goal(1, D), Goal(1, C), Goal(1, b"")])
        assert found.goal == 3
        assert [read(found, index) for index in range(2)] == [b"a" * 10, b"c" * 10]
        assert found.lease
        here = one.find(A, D, goals=[Goal(2, b""), Goal(1, b"")])
        assert (here.goal, read(here)) == (1, b"a" * 10)
        assert one.find(A, goals=[Goal(0, b"")]) == KvLeased(3, one.client.arena, 0, (), goal=0)
        assert one.find(D, goals=[Goal(1, C), Goal(0, D)]) == KvLeased(3, one.client.arena, 0, ())
        one.client.drop([C])
        assert one.find(A, goals=[Goal(1, C)]).goal == -1


def test_commits_before_close_arrive(path: Path) -> None:
    with running(path), RawClient(path) as observer:
        with engine(path) as short:
            short.arena()
            short.write(A, b"x")
        wait_until(lambda: observer.states(A) == ("hit",))


def test_close_gives_up_leases_and_reservations(path: Path) -> None:
    with running(path), RawClient(path) as observer:
        observer.put(A)
        with engine(path) as short:
            short.arena()
            assert short.lease(A).lease
            short.reserve(B)
        wait_until(lambda: observer.states(B) == ("miss",))
        wait_until(lambda: observer.call(kv.Stat).leased == 0)


def test_a_killed_store_with_calls_in_flight(path: Path) -> None:
    with running(path) as store, engine(path) as user:
        first = user.arena()
        user.write(A, b"old")
        old = user.lease(A)
        store.send(signal.SIGSTOP)
        for tag in range(100, 150):
            user.client.lease(tag, [A])
            user.client.reserve(tag + 1000, [kv.Entry(key=B, length=1, cost=1.0)])
        store.kill()
        for tag in range(100, 150):
            user.client.lease(tag + 2000, [A])
        answers = [user.next() for _ in range(150)]
        assert sorted(a.tag for a in answers if isinstance(a, KvLeased)) == [*range(100, 150), *range(2100, 2150)]
        assert sorted(a.tag for a in answers if isinstance(a, KvReserved)) == [*range(1100, 1150)]
        assert all(isinstance(a, (KvLeased, KvReserved)) and a.arena is None and not any(a.extents) for a in answers)
        assert old.arena is first
        assert read(old) == b"old", "an arena outlives its store"
        with running(path):
            second = user.arena()
            assert second is not first
            assert user.client.arena is second
            assert user.lease(A).extents == ()
            user.write(A, b"new")
            fresh = user.lease(A)
            assert fresh.lease != old.lease
            user.client.release(old.lease)  # void: must not end the new one's
            assert read(user.lease(A, tag=5)) == b"new"
            with RawClient(path) as observer:
                assert observer.call(kv.Stat).leased == 1
                observer.call(kv.Drop, keys=(A,))
                assert observer.call(kv.Stat).used_bytes == 4096, "still leased"
                user.client.release(fresh.lease)
                user.client.release(fresh.lease)
                assert user.lease(A).extents == ()
                assert observer.call(kv.Stat).leased == 1, "by the lease of tag 5"


def test_a_stopped_store_is_a_lost_one_until_it_goes_on(path: Path) -> None:
    with running(path) as store, engine(path, stall=0.3) as user:
        first = user.arena()
        store.send(signal.SIGSTOP)
        user.client.lease(1, [A])
        user.client.commit([B])
        assert user.next() == KvLeased(1, None, 0, ())
        assert not user.client.connected
        for tag in range(5):  # not even the handshake of the next attempts delays an answer
            start = time.monotonic()
            assert user.lease(A, tag=tag).arena is None
            assert time.monotonic() - start < 0.25
        store.send(signal.SIGCONT)
        second = user.arena()
        assert second is not first
        user.write(A, b"x")
        assert read(user.lease(A)) == b"x"


def test_a_commit_without_answer_is_enough_to_notice_a_stopped_store(path: Path) -> None:
    with running(path) as store, engine(path, stall=0.2) as user:
        user.arena()
        store.send(signal.SIGSTOP)
        user.client.commit([A])
        wait_until(lambda: not user.client.connected)
        store.kill()


def test_an_idle_connection_is_never_taken_for_a_stalled_one(path: Path) -> None:
    with running(path), engine(path, stall=0.1) as idle:
        arena = idle.arena()
        with pytest.raises(queue.Empty):
            idle.inbox.get(timeout=0.4)
        assert idle.client.arena is arena


def test_a_stopped_store_with_a_full_socket_blocks_no_caller(path: Path) -> None:
    with running(path) as store, engine(path, stall=1.0) as user:
        user.arena()
        store.send(signal.SIGSTOP)
        keys = [number.to_bytes(32, "big") for number in range(4096)]
        start = time.monotonic()
        for tag in range(50):
            user.client.lease(tag, keys)
        assert time.monotonic() - start < 0.5
        assert [user.next() for _ in range(50)] == [KvLeased(tag, None, 0, ()) for tag in range(50)]
        store.kill()


def test_4096_keys(path: Path) -> None:
    with running(path), engine(path) as user:
        user.arena()
        keys = [number.to_bytes(32, "big") for number in range(4096)]
        assert None not in user.reserve(*keys, length=4096).extents
        user.client.commit(keys)
        leased = user.lease(*keys)
        assert len({extents[0].offset for extents in leased.extents}) == 4096


def test_a_call_too_large_for_a_frame_is_a_miss(path: Path) -> None:
    with running(path), engine(path) as user:
        arena = user.arena()
        assert user.lease(bytes(kv.MAX_FRAME)) == KvLeased(1, None, 0, ())
        assert user.client.arena is arena


def test_an_entry_that_the_store_faults_is_answered_empty_and_the_connection_goes_on(path: Path) -> None:
    with running(path), engine(path) as user:
        arena = user.arena()
        assert user.reserve(A, length=-1) == KvReserved(2, None, (None,))
        assert user.reserve(A).extents[0] is not None
        assert user.client.arena is arena


def test_drop_of_nothing_drops_nothing(path: Path) -> None:
    with running(path), engine(path) as user:
        user.arena()
        user.write(A, b"x")
        user.client.drop([])
        assert len(user.lease(A).extents) == 1
        user.client.drop([A])
        assert user.lease(A).extents == ()


def test_no_descriptor_is_left_behind(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with running(path), engine(path) as user:
        user.arena()
    with running(path), engine(path) as user:
        user.arena()
        user.lease(A)
    user.inbox = queue.SimpleQueue()
    assert len(os.listdir("/proc/self/fd")) == before


class FakeStore:
    """Listens, and answers each connection's frames with what `script` makes of them: (reply bytes, descriptor or
    None), or None to close. `attempts` counts connections."""

    def __init__(self, path: Path, script: Callable[[kv.Call], tuple[bytes, int | None] | None]) -> None:
        self.attempts: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._script = script
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        attempt = 0
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            attempt += 1
            self.attempts.put(attempt)
            with connection, suppress(ConnectionError):  # a client that gives up may leave bytes unread
                self._converse(connection)

    def _converse(self, connection: socket.socket) -> None:
        reader = FrameReader()
        while chunk := connection.recv(2**16):
            for payload in reader.feed(chunk):
                answer = self._script(codec.kv_call.decode(payload))
                if answer is None:
                    return
                data, descriptor = answer
                socket.send_fds(connection, [data], [] if descriptor is None else [descriptor])

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(SECONDS)


@contextmanager
def fake_store(path: Path, script: Callable[[kv.Call], tuple[bytes, int | None] | None]) -> Generator[FakeStore]:
    store = FakeStore(path, script)
    try:
        yield store
    finally:
        store.close()


@pytest.fixture
def memfd() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 2**20)
    yield descriptor
    os.close(descriptor)


def welcome(memfd: int, call: kv.Call, arena_bytes: int = 2**20, version: int = 1) -> tuple[bytes, int | None]:
    return frame(kv.Welcome(call=call.call, arena_bytes=arena_bytes, version=version)), memfd


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        (lambda memfd, call: welcome(memfd, call, version=2), "version 2"),
        (lambda memfd, call: welcome(memfd, call, arena_bytes=2**21), "cannot be mapped"),
        (lambda memfd, call: welcome(memfd, call, arena_bytes=-1), "cannot be mapped"),
        (lambda memfd, call: (welcome(memfd, call)[0], None), "sent no arena"),
        (lambda memfd, call: (frame(kv.Fault(call=call.call, message="go away")), None), "refuses us: go away"),
        (lambda memfd, call: (frame(kv.Done(call=call.call, count=0)), None), "answered with Done"),
        (lambda memfd, call: (b"\x01\x00\x00\x00\xc1", None), "no reply"),
        (lambda memfd, call: (b"\xff\xff\xff\xff", None), "over the limit"),
        (lambda memfd, call: None, "closed the connection"),
    ],
    ids=["version", "too small", "negative", "no arena", "fault", "no welcome", "garbage", "oversized", "closed"],
)
def test_a_store_of_no_use_is_complained_of_once_and_tried_again(
    path: Path,
    memfd: int,
    caplog: pytest.LogCaptureFixture,
    script: Callable[[int, kv.Call], tuple[bytes, int | None] | None],
    complaint: str,
) -> None:
    with fake_store(path, lambda call: script(memfd, call)) as store, engine(path) as user:
        while store.attempts.get(timeout=SECONDS) < 3:
            assert user.lease(A).arena is None
        assert not user.client.connected
    assert [complaint in record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [True]


def test_answers_that_fit_no_question_end_the_connection_and_are_answered_empty(path: Path, memfd: int) -> None:
    wrong: list[Callable[[kv.Call], kv.Reply]] = [
        lambda call: kv.Done(call=call.call, count=1),
        lambda call: kv.Done(call=call.call + 100, count=1),
        lambda call: kv.Leased(call=call.call, lease=1, extents=((kv.Extent(0, 1),), (kv.Extent(0, 1),))),
        lambda call: kv.Reserved(call=call.call, extents=()),
    ]

    def script(call: kv.Call) -> tuple[bytes, int | None]:
        if isinstance(call, kv.Hello):
            return welcome(memfd, call)
        return frame(wrong.pop(0)(call)), None

    with fake_store(path, script), engine(path) as user:
        while wrong:
            user.arena()
            assert user.lease(A) == KvLeased(1, None, 0, ())
        user.arena()


def test_replies_in_any_order_reach_their_question(path: Path, memfd: int) -> None:
    held: list[kv.Reply] = []

    def script(call: kv.Call) -> tuple[bytes, int | None]:
        if isinstance(call, kv.Hello):
            return welcome(memfd, call)
        assert isinstance(call, kv.Lease)
        held.insert(0, kv.Leased(call=call.call, lease=9, extents=((kv.Extent(0, len(call.keys[0])),),)))
        return (b"".join(map(frame, held)) if len(held) == 3 else b""), None

    with fake_store(path, script), engine(path) as user:
        user.arena()
        for tag in (1, 2, 3):
            user.client.lease(tag, [b"k" * tag])
        answers = [user.next() for _ in range(3)]
        assert [(a.tag, a.extents[0][0].length) for a in answers if isinstance(a, KvLeased)] == [(3, 3), (2, 2), (1, 1)]
        assert len({a.lease for a in answers if isinstance(a, KvLeased)}) == 3


def test_a_lease_may_wait_for_the_disk_longer_than_a_stalled_store_is_given(path: Path, memfd: int) -> None:
    leases: list[int] = []
    pings: list[int] = []

    def script(call: kv.Call) -> tuple[bytes, int | None]:
        match call:
            case kv.Hello():
                return welcome(memfd, call)
            case kv.Lease():
                leases.append(call.call)
                return b"", None
            case kv.Stat():
                pings.append(call.call)
        stat = kv.StatReply(
            call=call.call,
            arena_bytes=1,
            used_bytes=0,
            objects=0,
            reserved=0,
            leased=0,
            hits=0,
            misses=0,
            evictions=0,
            clients=(),
        )
        if len(pings) < 4:
            return frame(stat), None
        leased = kv.Leased(call=leases[0], lease=9, extents=((kv.Extent(0, 1),),), from_disk=(0,))
        return frame(stat) + frame(leased), None

    with fake_store(path, script) as store, engine(path, stall=0.3) as user:
        arena = user.arena()
        started = time.monotonic()
        assert user.lease(A, B) == KvLeased(1, arena, 1, ((kv.Extent(0, 1),),), (0,))
        assert time.monotonic() - started > 0.3
        assert store.attempts.get(timeout=SECONDS) == 1
        assert store.attempts.empty()


def test_what_is_weighed_down_is_evicted_first_and_a_full_store_says_so(path: Path) -> None:
    with running(path, "8KiB"), engine(path) as user:
        user.arena()
        user.write(A, b"x" * 4096)
        user.write(B, b"x" * 4096)
        user.client.weigh([], 1.0)
        user.client.weigh([B], 0.25)
        user.write(C, b"x" * 4096)
        assert [user.has(key) for key in (A, B, C)] == [True, False, True]
        assert user.lease(A, C).lease
        refused = user.reserve(B, length=4096)
        assert (refused.extents, refused.full) == ((None,), 1)


def test_a_reply_cut_into_single_bytes_is_understood(path: Path) -> None:
    """Also the descriptor then comes with the first byte alone."""
    with running(path) as store:
        store_side, client_side = path, path.with_name("relay.sock")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(client_side))
        listener.listen()

        def relay() -> None:
            down, _ = listener.accept()
            up = socket.socket(socket.AF_UNIX)
            up.connect(str(store_side))
            down.settimeout(SECONDS)
            with down, up:
                for _ in range(2):
                    up.sendall(down.recv(2**16))
                    data, descriptors, _, _ = socket.recv_fds(up, 2**16, 1)
                    for position in range(len(data)):
                        socket.send_fds(down, [data[position : position + 1]], descriptors)
                        while descriptors:
                            os.close(descriptors.pop())
                down.recv(1)

        thread = threading.Thread(target=relay, daemon=True)
        thread.start()
        with engine(client_side) as user:
            user.arena()
            assert user.reserve(A).extents[0] is not None
        thread.join(SECONDS)
        listener.close()
        assert store.stop() == 0


def test_nothing_of_torch_is_imported() -> None:
    code = "import sys, services.engine.cache.kvstore_client; assert not {'torch', 'asyncio'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
