"""The store's books: what is written, summed, pruned and found again, with real files."""

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.gateway.sessions import RequestRecord, SessionHint, SessionStore, opening_digest
from services.gateway.sessions.database import MEMORY_ROWS
from services.gateway.sessions.store import LONGEST_ID
from services.gateway.sessions.writer import Limits
from services.protocol import hashing
from services.protocol.generate import Usage

OPENING = opening_digest(["user", "hello"])
BLOCKS = [bytes([n]) * hashing.HASH_BYTES for n in range(1, 9)]
USAGE = Usage(
    prompt_tokens=100,
    output_tokens=20,
    cached_device=48,
    cached_host=16,
    queue_seconds=0.5,
    restore_seconds=0.25,
    prefill_seconds=1.5,
    decode_seconds=2.5,
)


def hint(**names: str) -> SessionHint:
    return SessionHint(opening=OPENING, **names)


def record(request_id: str, session_id: str = "s", *, arrived: float = 1000.0, **fields: object) -> RequestRecord:
    values = {"model": "m", "status": 200, "usage": USAGE} | fields
    return RequestRecord(request_id=request_id, session_id=session_id, arrived=arrived, **values)  # type: ignore[arg-type]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SessionStore]:
    store = SessionStore(str(tmp_path / "new" / "folder" / "sessions.db"), max_rows=1000)
    await store.start()
    yield store
    await store.close()


async def test_a_session_sums_up_its_requests(store: SessionStore) -> None:
    store.record(record("r1", arrived=10.0, engine_id="engine-0", finish_reason="stop"))
    store.record(record("r2", arrived=30.0, status=499, finish_reason="cancel", error="client went away"))
    store.record(record("r3", arrived=20.0, status=503, usage=None, error="overloaded"))
    assert await store.flush(5)

    page = await store.sessions(limit=10, offset=0)
    (session,) = page.data
    assert page.total == 1
    assert page.persistent
    assert page.dropped_rows == 0
    assert (session.id, session.parent) == ("s", None)
    assert (session.first_seen, session.last_seen) == (10.0, 30.0)
    assert session.turns == 2, "a refused request is no turn"
    assert (session.prompt_tokens, session.output_tokens, session.cached_tokens) == (200, 40, 128)

    detail = await store.session("s", requests=10)
    assert detail is not None
    assert [request.id for request in detail.requests] == ["r3", "r2", "r1"]
    first = detail.requests[-1]
    assert (first.engine, first.model, first.finish_reason, first.status) == ("engine-0", "m", "stop", 200)
    assert (first.queue_seconds, first.restore_seconds) == (0.5, 0.25)
    assert (first.prefill_seconds, first.decode_seconds) == (1.5, 2.5)
    assert (first.cached_device, first.cached_host) == (48, 16)
    assert detail.requests[0].error == "overloaded"
    assert await store.session("nobody", requests=10) is None


async def test_pages_are_newest_first(store: SessionStore) -> None:
    for n in range(5):
        store.record(record(f"r{n}", f"s{n}", arrived=float(n)))
    await store.flush(5)
    page = await store.sessions(limit=2, offset=1)
    assert [session.id for session in page.data] == ["s3", "s2"]
    assert page.total == 5
    detail = await store.session("s0", requests=0)
    assert detail is not None
    assert detail.requests == []


async def test_a_request_without_a_session_is_kept_alone(store: SessionStore) -> None:
    store.record(record("r1", "", status=401, usage=None))
    assert await store.flush(5)
    assert (await store.sessions(limit=10, offset=0)).total == 0
    assert store.dropped_rows == 0


def test_the_clients_names_count_in_order() -> None:
    store = SessionStore("", 100)
    names = {"session_id": "a", "header": "b", "prompt_cache_key": "c", "user": "d"}
    for expected in "abcd":
        assert store.resolve(hint(**names), BLOCKS) == expected
        del names[next(iter(names))]
    assert store.resolve(hint(session_id="  ", header=" x "), []) == "x"
    assert store.resolve(hint(user="y" * 10_000), []) == "y" * LONGEST_ID
    assert store.resolve(hint(user="\ud800"), []) == "?"


async def test_sources_and_parents_are_written(store: SessionStore) -> None:
    ids = {
        "header": store.resolve(hint(header="named"), []),
        "lineage": store.resolve(hint(), BLOCKS[:4]),
    }
    assert store.resolve(hint(), BLOCKS[:5]) == ids["lineage"]
    fork = store.resolve(hint(), [*BLOCKS[:4], BLOCKS[7]])
    for number, session_id in enumerate([*ids.values(), fork]):
        store.record(record(f"r{number}", session_id))
    await store.flush(5)
    sessions = {session.id: session for session in (await store.sessions(limit=10, offset=0)).data}
    assert {source: sessions[session_id].source for source, session_id in ids.items()} == {
        source: source for source in ids
    }
    assert sessions[fork].parent == ids["lineage"]


async def test_lineage_outlives_the_gateway(tmp_path: Path) -> None:
    path = str(tmp_path / "s.db")
    first = SessionStore(path, 1000)
    await first.start()
    session = first.resolve(hint(), BLOCKS[:4])
    fork_parent = first.resolve(SessionHint(opening=b"x" * 16), BLOCKS[:4])
    first.record(record("r1", session))
    first.record(record("r2", fork_parent))
    await first.close()

    second = SessionStore(path, 1000)
    await second.start()
    assert second.resolve(hint(), BLOCKS[:6]) == session
    fork = second.resolve(SessionHint(opening=b"x" * 16), [*BLOCKS[:2], BLOCKS[7]])
    assert fork not in (session, fork_parent)
    second.record(record("r3", session))
    second.record(record("r4", fork))
    await second.flush(5)
    detail = await second.session(session, requests=10)
    assert detail is not None
    assert detail.session.turns == 2
    child = await second.session(fork, requests=10)
    assert child is not None
    assert child.session.parent == fork_parent
    await second.close()


async def test_lineage_of_a_session_that_memory_forgot_is_kept(store: SessionStore, tmp_path: Path) -> None:
    """Its row is written with what is known; the end of its chain is not overwritten by nothing."""
    session = store.resolve(hint(), BLOCKS)
    store.record(record("r1", session))
    await store.flush(5)
    await store.close()
    other = SessionStore(str(tmp_path / "new" / "folder" / "sessions.db"), 1000)
    other.record(record("r2", session))  # before start: nothing is restored yet
    await other.start()
    await other.flush(5)
    assert other.resolve(hint(), BLOCKS) == session
    detail = await other.session(session, requests=10)
    assert detail is not None
    assert detail.session.turns == 2
    await other.close()


async def test_the_oldest_requests_go_first_and_take_their_sessions_along(tmp_path: Path) -> None:
    store = SessionStore(str(tmp_path / "s.db"), max_rows=100, limits=Limits(batch_rows=16))
    await store.start()
    for n in range(250):
        store.record(record(f"r{n}", "long" if n % 2 else f"s{n}", arrived=float(n)))
    await store.flush(10)
    with sqlite3.connect(tmp_path / "s.db") as reader:
        kept = [row[0] for row in reader.execute("SELECT id FROM requests ORDER BY number")]
        orphans = reader.execute("SELECT count(*) FROM sessions WHERE id NOT IN (SELECT session_id FROM requests)")
        assert orphans.fetchone() == (0,)
    reader.close()
    assert kept == [f"r{n}" for n in range(150, 250)]
    page = await store.sessions(limit=500, offset=0)
    assert page.total == 51
    assert page.data[0].turns == 125, "sums stay when requests go"
    await store.close()


async def test_a_smaller_limit_applies_to_an_old_file(tmp_path: Path) -> None:
    for max_rows in (500, 100):
        store = SessionStore(str(tmp_path / "s.db"), max_rows)
        await store.start()
        for n in range(300):
            store.record(record(f"{max_rows}-{n}", f"s{n}", arrived=float(n)))
        await store.close()
    with sqlite3.connect(tmp_path / "s.db") as reader:
        assert reader.execute("SELECT count(*) FROM requests").fetchone() == (100,)
    reader.close()


async def test_a_request_is_written_once(store: SessionStore) -> None:
    for _ in range(3):
        store.record(record("r1"))
    await store.flush(5)
    store.record(record("r1"))
    await store.flush(5)
    detail = await store.session("s", requests=10)
    assert detail is not None
    assert detail.session.turns == 1
    assert len(detail.requests) == 1


async def test_a_row_that_cannot_be_written_costs_only_itself(store: SessionStore) -> None:
    for n in range(20):
        tokens = 2**70 if n == 7 else 1
        store.record(record(f"r{n}", usage=Usage(prompt_tokens=tokens, output_tokens=1), error="\ud800"))
    assert await store.flush(5)
    assert store.dropped_rows == 1
    detail = await store.session("s", requests=50)
    assert detail is not None
    assert detail.session.turns == 19
    assert len(detail.requests) == 19


async def test_record_never_raises(store: SessionStore) -> None:
    store.record(None)  # type: ignore[arg-type]
    assert store.dropped_rows == 1


async def test_close_writes_what_waits_and_counts_what_comes_later(tmp_path: Path) -> None:
    store = SessionStore(str(tmp_path / "s.db"), 10_000)
    await store.start()
    for n in range(1000):
        store.record(record(f"r{n}"))
    await store.close()
    assert store.dropped_rows == 0
    store.record(record("late"))
    assert store.dropped_rows == 1
    with sqlite3.connect(tmp_path / "s.db") as reader:
        assert reader.execute("SELECT count(*) FROM requests").fetchone() == (1000,)
    reader.close()
    assert os.listdir(tmp_path) == ["s.db"], "no -wal or -shm is left"


async def test_a_flood_is_bounded(tmp_path: Path) -> None:
    store = SessionStore(str(tmp_path / "s.db"), 100_000)
    await store.start()
    for n in range(10_000):
        store.record(record(f"r{n}"))
    assert store.waiting_rows == Limits().queue_rows
    assert await store.flush(30)
    assert store.dropped_rows == 10_000 - Limits().queue_rows
    detail = await store.session("s", requests=1)
    assert detail is not None
    assert detail.session.turns + store.dropped_rows == 10_000
    await store.close()


async def test_a_steady_flood_is_written_whole(tmp_path: Path) -> None:
    store = SessionStore(str(tmp_path / "s.db"), 100_000)
    await store.start()
    for n in range(10_000):
        store.record(record(f"r{n}"))
        if n % 1000 == 999:
            assert await store.flush(30)
    assert store.dropped_rows == 0
    await store.close()


async def test_readers_and_writer_at_once(store: SessionStore) -> None:
    async def read() -> None:
        for _ in range(20):
            await store.sessions(limit=10, offset=0)
            await store.session("s", requests=10)

    async def write() -> None:
        for n in range(20):
            store.record(record(f"r{n}"))
            await store.flush(5)

    await asyncio.gather(read(), read(), read(), write())
    assert store.dropped_rows == 0


async def test_without_a_file_sessions_live_in_memory() -> None:
    store = SessionStore("", max_rows=1_000_000)
    await store.start()
    session = store.resolve(hint(), BLOCKS)
    store.record(record("r1", session))
    await store.flush(5)
    page = await store.sessions(limit=10, offset=0)
    assert [entry.id for entry in page.data] == [session]
    assert not page.persistent
    for start in range(0, MEMORY_ROWS + 100, 1000):
        for n in range(start, start + 1000):
            store.record(record(f"x{n}", f"s{n}", arrived=float(2000 + n)))
        await store.flush(10)
    assert (await store.sessions(limit=1, offset=0)).total == MEMORY_ROWS
    await store.close()
