"""Stored responses: found at once and after a restart, bounded, and never in the way of an answer."""

import sqlite3
from pathlib import Path

import msgspec
import pytest

from services.gateway.errors import ApiError
from services.gateway.responses.store import ResponseStore
from services.gateway.sessions import ResponseBounds, SessionStore
from services.gateway.sessions.records import ResponseRecord
from services.gateway.sessions.writer import Limits
from tests.gateway.http_gateway import gateway
from tests.gateway.responses_rig import TINY, post, saying

QUICK = Limits(queue_rows=50, queue_bytes=4000, batch_rows=16, busy_seconds=0.05, retry_first=0.02, retry_longest=0.1)


def record(
    id: str, previous: str | None = None, chain: str = "", created: float = 1.0, size: int = 0
) -> ResponseRecord:
    return ResponseRecord(
        id=id,
        chain=chain or id,
        previous=previous,
        created=created,
        response=msgspec.json.encode({"id": id, "output": [{"type": "message", "id": f"out-{id}"}]}),
        items=msgspec.json.encode([{"type": "message", "id": f"in-{id}", "text": "x" * size}]),
    )


def written(path: Path) -> list[str]:
    reader = sqlite3.connect(path)
    try:
        return [id for (id,) in reader.execute("SELECT id FROM responses ORDER BY number")]
    finally:
        reader.close()


async def started(path: Path | str, bounds: ResponseBounds | None = None, limits: Limits | None = None) -> SessionStore:
    sessions = SessionStore(str(path), 1000, limits, bounds or ResponseBounds())
    await sessions.start()
    return sessions


@pytest.mark.parametrize("recent_bytes", [2**20, 0])
async def test_a_chain_in_memory_and_in_the_database(tmp_path: Path, recent_bytes: int) -> None:
    sessions = await started(tmp_path / "s.db")
    store = ResponseStore(sessions, recent_bytes)
    store.keep(record("a"))
    store.keep(record("b", "a", "a"))
    if not recent_bytes:
        assert await sessions.flush(5)
    history = await store.history("b")
    assert history.chain == "a"
    assert [item["id"] for item in history.items] == ["in-a", "out-a", "in-b", "out-b"]
    assert [item["id"] for item in await store.inputs("b")] == ["in-a", "out-a", "in-b"]
    assert await store.get("a") == record("a")
    await sessions.close()


async def test_a_deleted_response_is_gone_at_once_and_for_good(tmp_path: Path) -> None:
    sessions = await started(tmp_path / "s.db")
    store = ResponseStore(sessions)
    store.keep(record("a"))
    store.keep(record("b"))
    await store.delete("a")
    with pytest.raises(ApiError, match="no response `a`"):
        await store.get("a")
    assert await sessions.flush(5)
    assert written(tmp_path / "s.db") == ["b"]
    with pytest.raises(ApiError) as error:
        await ResponseStore(sessions).get("a")
    assert error.value.status == 404
    await sessions.close()


async def test_rows_are_bounded_and_a_chain_in_use_is_kept(tmp_path: Path) -> None:
    sessions = await started(tmp_path / "s.db", ResponseBounds(rows=3))
    store = ResponseStore(sessions)
    store.keep(record("a", created=1))
    store.keep(record("b", created=2))
    store.keep(record("c", created=3))
    store.keep(record("a2", "a", "a", created=4))
    assert await sessions.flush(5)
    assert written(tmp_path / "s.db") == ["a", "c", "a2"], "the chain of `a` was used since `b`"
    await sessions.close()


async def test_bytes_are_bounded(tmp_path: Path) -> None:
    sessions = await started(tmp_path / "s.db", ResponseBounds(bytes=2500))
    store = ResponseStore(sessions)
    for number in range(5):
        store.keep(record(f"r{number}", created=number, size=900))
        assert await sessions.flush(5)
    assert written(tmp_path / "s.db") == ["r3", "r4"]
    store.keep(record("huge", created=9, size=5000))
    assert await sessions.flush(5)
    assert written(tmp_path / "s.db") == []
    await sessions.close()


async def test_a_long_chain_loses_its_beginning_first(tmp_path: Path) -> None:
    sessions = await started(tmp_path / "s.db", ResponseBounds(rows=2))
    store = ResponseStore(sessions, recent_bytes=0)
    for number in range(4):
        store.keep(record(f"r{number}", f"r{number - 1}" if number else None, "r0", created=number))
    assert await sessions.flush(5)
    assert written(tmp_path / "s.db") == ["r2", "r3"]
    with pytest.raises(ApiError, match="`r1`, an earlier one"):
        await store.history("r3")
    await sessions.close()


async def test_memory_holds_the_newest_up_to_its_bound() -> None:
    sessions = await started("")
    store = ResponseStore(sessions, recent_bytes=3 * record("r00", size=900).size)
    for number in range(10, 60):
        store.keep(record(f"r{number}", size=900))
    assert list(store._recent) == ["r57", "r58", "r59"]
    assert store._bytes == sum(kept.size for kept in store._recent.values())
    await store.delete("r58")
    assert store._bytes == 2 * record("r00", size=900).size
    await sessions.close()


async def test_a_locked_file_costs_rows_and_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    sessions = await started(path, limits=QUICK)
    store = ResponseStore(sessions)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    for number in range(40):
        store.keep(record(f"r{number}", size=900))
    waiting = QUICK.queue_bytes // record("r0", size=900).size
    assert sessions.waiting_rows == waiting < QUICK.queue_rows, "bytes bound the queue"
    assert sessions.dropped_rows == 40 - waiting
    assert [item["id"] for item in (await store.history("r39")).items] == ["in-r39", "out-r39"], "in memory"
    holder.execute("ROLLBACK")
    holder.close()
    assert await sessions.flush(10)
    assert written(path) == [f"r{number}" for number in range(waiting)]
    store.keep(record("later", size=900))
    assert await sessions.flush(10)
    assert sessions.dropped_rows == 40 - waiting, "what was written counts no more"
    await sessions.close()


async def test_a_corrupt_file(tmp_path: Path) -> None:
    """Answers go on, chains too while they are in memory; only what is not known there is a 503."""
    path = tmp_path / "s.db"
    path.write_bytes(b"this is no database" * 1000)
    async with gateway(saying("Hello!"), str(path)) as g:
        first = (await post(g, input="Hi")).json()
        second = await post(g, input="And?", previous_response_id=first["id"])
        assert second.status_code == 200
        unknown = await post(g, input="Hi", previous_response_id="resp_x", model=TINY)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (503, "responses_unavailable")
        assert (await g.http.get("/v1/responses/resp_x")).status_code == 503
