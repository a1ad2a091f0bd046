"""A load generator that costs little itself: answers of two API families over raw sockets, each event timed."""

import asyncio
import json
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from bench.gateway_answers import TOOLS, Said

Family = Literal["chat", "messages"]
MODEL = "scripted"
ANSWER_SECONDS = 120


@dataclass(eq=False)
class Exchange:
    """One answer as its client saw it."""

    family: Family
    request_id: str = ""
    arrivals: "array[int]" = field(default_factory=lambda: array("q"))
    """time.monotonic_ns() of each event that brought some of the answer."""
    shown: "array[int]" = field(default_factory=lambda: array("q"))
    """Characters of thoughts, content and arguments with that event."""
    said: Said | None = None
    """None: it broke off."""


class _Events(Protocol):
    """Reads the events of one family."""

    ended: bool

    def take(self, data: bytes) -> int:
        """One event's JSON; how many characters of the answer it brings."""
        ...

    def said(self) -> Said: ...


class _Function(Struct):
    arguments: str = ""


class _ChatCall(Struct):
    function: _Function
    id: str = ""


class _ChatDelta(Struct):
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[_ChatCall] = []


class _Choice(Struct):
    delta: _ChatDelta


class _Chunk(Struct):
    choices: list[_Choice] = []


_chunk = msgspec.json.Decoder(_Chunk).decode


class _Collected:
    def __init__(self) -> None:
        self.ended = False
        self._thoughts: list[str] = []
        self._content: list[str] = []
        self._calls: list[list[str]] = []

    def said(self) -> Said:
        return Said("".join(self._thoughts), "".join(self._content), tuple("".join(call) for call in self._calls))


class _ChatEvents(_Collected):
    def take(self, data: bytes) -> int:
        if data.startswith(b"[DONE]"):
            self.ended = True
            return 0
        size = 0
        for choice in _chunk(data).choices:
            delta = choice.delta
            if delta.content:
                self._content.append(delta.content)
            if delta.reasoning_content:
                self._thoughts.append(delta.reasoning_content)
            for call in delta.tool_calls:
                if call.id:
                    self._calls.append([])
                self._calls[-1].append(call.function.arguments)
                size += len(call.function.arguments)
            size += len(delta.content) + len(delta.reasoning_content)
        return size


class _Block(Struct):
    type: str


class _BlockDelta(Struct):
    text: str = ""
    thinking: str = ""
    partial_json: str = ""


class _Event(Struct):
    type: str
    content_block: _Block | None = None
    delta: _BlockDelta | None = None


_event = msgspec.json.Decoder(_Event).decode


class _MessageEvents(_Collected):
    def take(self, data: bytes) -> int:
        event = _event(data)
        if event.type == "content_block_delta" and event.delta is not None:
            delta = event.delta
            if delta.text:
                self._content.append(delta.text)
            if delta.thinking:
                self._thoughts.append(delta.thinking)
            if delta.partial_json:
                self._calls[-1].append(delta.partial_json)
            return len(delta.text) + len(delta.thinking) + len(delta.partial_json)
        if event.type == "content_block_start" and event.content_block is not None:
            if event.content_block.type == "tool_use":
                self._calls.append([])
        elif event.type == "message_stop":
            self.ended = True
        return 0


class _Socket(asyncio.Protocol):
    """Sends one request; reads its events as they come."""

    def __init__(self, request: bytes, exchange: Exchange) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._exchange = exchange
        self._events: _Events = _ChatEvents() if exchange.family == "chat" else _MessageEvents()
        self._head = True
        self._rest = b""
        self._total = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        *lines, self._rest = (self._rest + data).split(b"\n")
        exchange = self._exchange
        for line in lines:
            if line.startswith(b"data: "):
                size = self._events.take(line[6:])
                if size:
                    self._total += size
                    exchange.arrivals.append(now)
                    exchange.shown.append(self._total)
            elif self._head:
                self._read_head(line)

    def _read_head(self, line: bytes) -> None:
        name, _, value = line.decode().strip().partition(": ")
        if name.startswith("HTTP/") and " 200 " not in name:
            if not self.over.done():  # nobody waits any more when the stack ends
                self.over.set_exception(RuntimeError(f"the gateway answered {name}"))
        elif name.lower() == "x-request-id":
            self._exchange.request_id = value
        elif not name:
            self._head = False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._events.ended:
            self._exchange.said = self._events.said()
        if not self.over.done():
            self.over.set_result(None)


def body(family: Family, messages: Sequence[Mapping[str, str]], max_tokens: int = 100_000) -> bytes:
    """Of a streamed request with tools. `messages`: `role` (user or assistant) and `content`."""
    fields: dict[str, Any] = {"model": MODEL, "stream": True, "max_tokens": max_tokens, "messages": messages}
    if family == "chat":
        fields["tools"] = TOOLS
    else:
        functions = [tool["function"] for tool in TOOLS]
        fields["tools"] = [
            {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in functions
        ]
    return json.dumps(fields).encode()


async def stream(url: str, family: Family, session: str, body: bytes) -> Exchange:
    """One answer, to its end. Raises RuntimeError on any status but 200, TimeoutError and OSError."""
    address = urlsplit(url)
    path = "/v1/chat/completions" if family == "chat" else "/v1/messages"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        f"x-session-id: {session}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    exchange = Exchange(family)
    loop = asyncio.get_running_loop()
    transport, socket = await loop.create_connection(
        lambda: _Socket(head.encode() + body, exchange), address.hostname or "", address.port or 80
    )
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await socket.over
    finally:
        transport.close()
    return exchange
