"""Stands between a client and the gateway, and keeps what each said: the client's requests as they were sent, and the
bytes of the answers."""

import asyncio
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import httpx
import uvicorn
from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send

from tests.e2e.stack import free_port, wait_until

_HOP_BY_HOP = frozenset({"host", "connection", "keep-alive", "transfer-encoding", "content-length", "accept-encoding"})


@dataclass(slots=True)
class Exchange:
    """One request and its answer, which grows while it streams."""

    method: str
    path: str
    """With the query."""
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    status: int = 0
    """0: the gateway could not be reached."""
    answer: bytearray = field(default_factory=bytearray)
    ended: bool = False
    """The answer came to its end while its client listened."""


@dataclass(frozen=True, slots=True)
class Recorder:
    url: str
    exchanges: list[Exchange]
    """In the order of their requests; appended to by the recorder's thread."""


@contextmanager
def recording(gateway: str) -> Generator[Recorder]:
    """A recorder in front of the gateway at that URL, on a free port and a thread of its own."""
    exchanges: list[Exchange] = []
    port = free_port()
    config = uvicorn.Config(_forwarding(gateway, exchanges), "127.0.0.1", port, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="recorder")
    thread.start()
    try:
        wait_until("the recorder listens", lambda: server.started)
        yield Recorder(f"http://127.0.0.1:{port}", exchanges)
    finally:
        server.should_exit = True
        thread.join()


def _forwarding(gateway: str, exchanges: list[Exchange]) -> ASGIApp:
    async def answer(exchange: Exchange, send: Send) -> None:
        headers = {name: value for name, value in exchange.headers.items() if name not in _HOP_BY_HOP}
        async with (
            httpx.AsyncClient(timeout=None, trust_env=False) as http,
            http.stream(exchange.method, gateway + exchange.path, headers=headers, content=exchange.body) as answer,
        ):
            exchange.status = answer.status_code
            head = [(name, value) for name, value in answer.headers.raw if name.decode().lower() not in _HOP_BY_HOP]
            await send({"type": "http.response.start", "status": answer.status_code, "headers": head})
            async for part in answer.aiter_raw():
                exchange.answer += part
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            exchange.ended = True

    async def forward(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = await _request(cast("HTTPScope", scope), receive)
        exchanges.append(exchange)
        # A client that leaves must leave the gateway too.
        tasks = asyncio.create_task(answer(exchange, send)), asyncio.create_task(_left(receive))
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    return forward


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _request(scope: HTTPScope, receive: Receive) -> Exchange:
    query = scope["query_string"].decode()
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            break
        body += message["body"]
        more = message["more_body"]
    return Exchange(
        method=scope["method"],
        path=scope["path"] + ("?" + query if query else ""),
        headers={name.decode().lower(): value.decode() for name, value in scope["headers"]},
        body=bytes(body),
    )
