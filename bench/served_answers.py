"""Answers of a server to the same questions again and again: what a greedy model must say twice, and what it says it
took."""

import json
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

_TIMEOUT = httpx.Timeout(300, connect=10)
_WORD = re.compile(r" [a-z]+")


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    """Thoughts and content."""
    usage: dict[str, Any]
    finish: str
    arrivals: tuple[float, ...]
    """Seconds from the request to each piece of text."""

    @property
    def prompt(self) -> int:
        return int(self.usage["prompt_tokens"])

    @property
    def tokens(self) -> int:
        return int(self.usage["completion_tokens"])

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def rate(self) -> float:
        """Tokens a second behind the first piece of text."""
        return (self.tokens - 1) / (self.arrivals[-1] - self.arrivals[0])

    def told(self) -> str:
        return f"{self.prompt} + {self.tokens} tokens, {self.cached} cached, {self.finish}, {self.arrivals[0]:.2f} s"


class Asking:
    """Greedy answers. `salt`: what was cached for another one is not used."""

    def __init__(self, url: str, limit: int) -> None:
        """`limit`: tokens of an answer, which has as many."""
        self._url, self._limit = url, limit

    def chat(self, content: str, salt: str, stream: bool = False, limit: int = 0) -> Answer:
        """Raises httpx.HTTPError."""
        body = {
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": limit or self._limit,
            "cache_salt": salt,
        }
        return self._streamed(body) if stream else self._whole("/v1/chat/completions", body)

    def together(self, contents: Sequence[str], salt: str, limit: int = 0) -> list[Answer]:
        """Streamed, all at once. Raises httpx.HTTPError."""
        with ThreadPoolExecutor(len(contents)) as pool:
            return list(pool.map(lambda content: self.chat(content, salt, stream=True, limit=limit), contents))

    def complete(self, prompt: Sequence[int], limit: int) -> Answer:
        """Behind the ids of a prompt. Raises httpx.HTTPError."""
        body = {"prompt": list(prompt), "temperature": 0, "max_tokens": limit}
        return self._whole("/v1/completions", body)

    def _whole(self, path: str, body: dict[str, Any]) -> Answer:
        begin = time.perf_counter()
        reply = httpx.post(self._url + path, json=body, timeout=_TIMEOUT)
        seconds = time.perf_counter() - begin
        _check(reply)
        answer = reply.json()
        choice = answer["choices"][0]
        text = choice["text"] if "text" in choice else _text(choice["message"])
        return Answer(text, answer["usage"], choice["finish_reason"], (seconds,))

    def _streamed(self, body: dict[str, Any]) -> Answer:
        begin = time.perf_counter()
        whole = {**body, "stream": True, "stream_options": {"include_usage": True}}
        text, usage, finish = "", None, ""
        arrivals: list[float] = []
        url = f"{self._url}/v1/chat/completions"
        with httpx.stream("POST", url, json=whole, timeout=_TIMEOUT) as reply:
            if reply.is_error:
                reply.read()
            _check(reply)
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    finish = choice["finish_reason"] or finish
                    if piece := _text(choice["delta"]):
                        text += piece
                        arrivals.append(time.perf_counter() - begin)
        if usage is None or not arrivals:
            raise httpx.RemoteProtocolError(f"a stream without usage or text: {text!r}, {usage}")
        return Answer(text, usage, finish, tuple(arrivals))


def words(text: str) -> list[str]:
    """Of a text that consists of words with a space before each. Raises ValueError for another one."""
    found = _WORD.findall(text)
    if "".join(found) != text:
        raise ValueError(f"not only words: {text!r}")
    return found


def agreeing(first: str, second: str) -> int:
    """Words that two texts begin with both."""
    count = 0
    for one, other in zip(first.split(), second.split(), strict=False):
        if one != other:
            break
        count += 1
    return count


def _text(part: dict[str, Any]) -> str:
    return (part.get("reasoning_content") or "") + (part.get("content") or "")


def _check(reply: httpx.Response) -> None:
    if reply.is_error:
        message = f"{reply.status_code} {reply.text[:500]}"
        raise httpx.HTTPStatusError(message, request=reply.request, response=reply)
