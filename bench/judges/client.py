"""A client of our own, for what no outside judge asks: one that leaves, one that comes back, and some that stay."""

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from bench.judges.outside import MODEL

CHARS_PER_TOKEN = 2.75
"""Of `text` under the small model's tokenizer."""
_WORDS = (
    *("river", "stone", "lamp", "wheel", "garden", "paper", "window", "silver", "horse", "candle", "bridge", "cloud"),
    *("market", "engine", "orange", "simple", "letter", "mountain", "number", "little", "yellow", "answer", "winter"),
)
_TIMEOUT = httpx.Timeout(600, connect=5)


@dataclass(frozen=True, slots=True)
class Answer:
    first: float
    """Seconds from the request to the first text."""
    usage: dict[str, Any]

    @property
    def prompt(self) -> int:
        return int(self.usage["prompt_tokens"])

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def computed(self) -> int:
        return int(self.usage["samovar"]["computed_tokens"])

    @property
    def waited(self) -> float:
        """Seconds from the arrival at the engine to the first step that computed something of it."""
        return float(self.usage["samovar"]["queue_seconds"])


def text(tokens: int, salt: str) -> str:
    """About so many tokens, which share nothing with those of another salt beyond a word or two."""
    draw = random.Random(salt)
    length = int(tokens * CHARS_PER_TOKEN)
    words: list[str] = []
    while length > 0:
        words.append(draw.choice(_WORDS))
        length -= len(words[-1]) + 1
    return " ".join(words)


def ask(url: str, content: str, **fields: Any) -> Answer:
    """One streamed answer, of one token where `fields` say nothing else. Raises httpx.HTTPError."""
    begin = time.monotonic()
    first, usage = 0.0, None
    for chunk in _chunks(url, content, fields):
        usage = chunk.get("usage") or usage
        if not first and _text(chunk):
            first = time.monotonic() - begin
    if usage is None:
        raise httpx.RemoteProtocolError("the stream ended without its usage")
    return Answer(first, usage)


def leave(url: str, content: str, ready: Callable[[], bool], seconds: float) -> None:
    """Ask, read nothing, and hang up as soon as `ready`. Raises TimeoutError after `seconds`."""
    address = urlsplit(url)
    body = json.dumps(_body(content, {})).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=seconds) as connection:
        connection.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        deadline = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no moment to leave within {seconds:g} s")
            time.sleep(0.02)


class Decoding:
    """Streams that go on until they are told to stop. `arrivals`: time.monotonic() of each piece of text of all."""

    def __init__(self, url: str, streams: int, stop_ids: Sequence[int]) -> None:
        self._url, self._stop = url, threading.Event()
        self._bias = {str(token): -100 for token in stop_ids}
        self._lists: list[list[float]] = [[] for _ in range(streams)]
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(streams)]

    @property
    def arrivals(self) -> list[float]:
        return sorted(moment for moments in self._lists for moment in list(moments))

    def _run(self, index: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            content = f"{text(20, f'decode {index} {turn}')}\n\nCount from 1 to 9000."
            fields = {"max_tokens": 4000, "logit_bias": self._bias, "reasoning_effort": "none"}
            for chunk in _chunks(self._url, content, fields):
                if self._stop.is_set():
                    return
                if _text(chunk):
                    self._lists[index].append(time.monotonic())

    def __enter__(self) -> "Decoding":
        for thread in self._threads:
            thread.start()
        while not all(len(moments) > 8 for moments in self._lists):
            if not all(thread.is_alive() for thread in self._threads):
                raise RuntimeError("a stream ended at once")
            time.sleep(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)


def _chunks(url: str, content: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with httpx.Client(timeout=_TIMEOUT) as client, _post(client, url, content, fields) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


@contextmanager
def _post(client: httpx.Client, url: str, content: str, fields: dict[str, Any]) -> Generator[httpx.Response]:
    with client.stream("POST", f"{url}/v1/chat/completions", json=_body(content, fields)) as reply:
        if reply.status_code != 200:
            raise httpx.HTTPStatusError(reply.read().decode(errors="replace"), request=reply.request, response=reply)
        yield reply


def _body(content: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 1,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


def _text(chunk: dict[str, Any]) -> str:
    """What an answer says or thinks in this chunk; an error that came in the stream is raised as RuntimeError."""
    if "error" in chunk:
        raise RuntimeError(f"the stream failed: {chunk['error']}")
    delta = (chunk.get("choices") or [{}])[0].get("delta", {})
    return delta.get("content") or delta.get("reasoning_content") or ""
