"""A load generator that costs little itself: streamed chats over raw asyncio sockets, each token's arrival timed."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


_chunk = msgspec.json.Decoder(_Chunk)


@dataclass
class Stream:
    """What one client saw. Times are time.monotonic_ns()."""

    text: list[str] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)
    """arrivals[i] is when text[i] came."""
    request_id: str = ""
    finished: bool = False


async def chat(url: str, model: str, prompt: str, max_tokens: int = 100_000) -> Stream:
    """Stream one answer to its end. Raises RuntimeError on any status but 200."""
    address = urlsplit(url)
    body = json.dumps(
        {
            "model": model,
            "stream": True,
            "max_tokens": max_tokens,
            "temperature": 0,
            "messages": [{"role": "user", "content": prompt}],
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    seen = Stream()
    try:
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status.decode().strip()}: {(await reader.read()).decode(errors='replace')}")
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode().partition(":")
            if name.lower() == "x-request-id":
                seen.request_id = value.strip()
        async for line in reader:
            if not line.startswith(b"data: "):
                continue
            now = time.monotonic_ns()
            if line.startswith(b"data: [DONE]"):
                seen.finished = True
                break
            for choice in _chunk.decode(line[6:]).choices:
                if choice.delta.content:
                    seen.text.append(choice.delta.content)
                    seen.arrivals.append(now)
    finally:
        writer.close()
    return seen
