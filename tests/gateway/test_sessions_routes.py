"""`/api/sessions` over HTTP."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from litestar import Litestar

from services.gateway.errors import as_api_error, as_response
from services.gateway.sessions import RequestRecord, SessionHint, SessionStore, session_routes
from services.protocol.generate import Usage


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SessionStore]:
    store = SessionStore(str(tmp_path / "s.db"), 1000)
    await store.start()
    yield store
    await store.close()


def connect(store: SessionStore) -> httpx.AsyncClient:
    """To an app that shapes errors as the gateway does."""
    app: Any = Litestar(
        session_routes(store), exception_handlers={Exception: lambda _, error: as_response(as_api_error(error))}
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.fixture
async def client(store: SessionStore) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(store) as client:
        yield client


async def fill(store: SessionStore, *names: str) -> None:
    for number, name in enumerate(names):
        session = store.resolve(SessionHint(opening=b"", user=name), [])
        usage = Usage(prompt_tokens=10, output_tokens=3, cached_device=4, cached_host=2, queue_seconds=0.5)
        store.record(
            RequestRecord(
                request_id=f"r{number}",
                session_id=session,
                model="m",
                engine_id="engine-0",
                arrived=float(number),
                status=200,
                usage=usage,
                finish_reason="stop",
            )
        )
    assert await store.flush(5)


async def test_the_list(client: httpx.AsyncClient, store: SessionStore) -> None:
    empty = await client.get("/api/sessions")
    assert empty.status_code == 200
    assert empty.json() == {
        "object": "list",
        "data": [],
        "total": 0,
        "limit": 50,
        "offset": 0,
        "persistent": True,
        "dropped_rows": 0,
    }
    await fill(store, "a", "b", "c")
    page = (await client.get("/api/sessions", params={"limit": 1, "offset": 1})).json()
    assert (page["total"], page["limit"], page["offset"]) == (3, 1, 1)
    assert page["data"] == [
        {
            "id": "b",
            "parent": None,
            "source": "user",
            "first_seen": 1.0,
            "last_seen": 1.0,
            "turns": 1,
            "prompt_tokens": 10,
            "output_tokens": 3,
            "cached_tokens": 6,
        }
    ]


@pytest.mark.parametrize("name", ["plain", "me@example.org/work?x=1", "two words", "héllo", "100%"])
async def test_one_session(client: httpx.AsyncClient, store: SessionStore, name: str) -> None:
    await fill(store, name, name)
    reply = await client.get(f"/api/sessions/{quote(name, safe='')}")
    assert reply.status_code == 200
    detail = reply.json()
    assert detail["session"]["id"] == name
    assert detail["session"]["turns"] == 2
    assert [request["id"] for request in detail["requests"]] == ["r1", "r0"]
    assert detail["requests"][0]["queue_seconds"] == 0.5
    assert detail["requests"][0]["finish_reason"] == "stop"


async def test_an_unknown_session(client: httpx.AsyncClient) -> None:
    reply = await client.get("/api/sessions/nobody")
    assert reply.status_code == 404
    error = reply.json()["error"]
    assert error["code"] == "session_not_found"
    assert error["type"] == "invalid_request_error"
    assert "nobody" in error["message"]


@pytest.mark.parametrize("query", ["limit=0", "limit=501", "limit=x", "offset=-1", f"offset={2**63}"])
async def test_a_bad_page(client: httpx.AsyncClient, query: str) -> None:
    reply = await client.get(f"/api/sessions?{query}")
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


async def test_a_database_that_cannot_be_read(tmp_path: Path) -> None:
    store = SessionStore(str(tmp_path), 1000)  # a folder
    await store.start()
    async with connect(store) as client:
        for path in ("/api/sessions", "/api/sessions/x"):
            reply = await client.get(path)
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "sessions_unavailable"
    await store.close()
