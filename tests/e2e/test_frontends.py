"""What agent frontends need of all processes together; the whole list is `tests/gateway/test_frontend_checklist.py`."""

import asyncio
import json
from typing import Any

import httpx

from tests.e2e.stack import Stack


async def test_short_answers_overtake_long_ones(scripted: Stack) -> None:
    """As OpenFox asks when it tries which switch turns the thinking off: the fastest answer wins."""
    over: list[str] = []

    async def ask(http: httpx.AsyncClient, text: str) -> None:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 50}
        response = await http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200
        over.append(text)

    async with httpx.AsyncClient(base_url=scripted.url, timeout=15) as http:
        await asyncio.gather(*(ask(http, text) for text in ["slow"] * 4 + ["hello"] * 6))
    assert over == ["hello"] * 6 + ["slow"] * 4


async def test_an_aborted_turn_is_found_in_the_cache(scripted: Stack) -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Be slow. " + "Say it in plain words. " * 10}]
    async with httpx.AsyncClient(base_url=scripted.url, timeout=15) as http:
        text = ""
        body = {"messages": turns, "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        text += choice["delta"].get("content", "")
                if len(text) >= 100:
                    break
        turns += [{"role": "assistant", "content": text.rstrip()}, {"role": "user", "content": "hello"}]
        answer = (await http.post("/v1/chat/completions", json={"messages": turns})).json()
        asked = [{"role": "user", "content": turns[0]["content"]}]
        before = (await http.post("/tokenize", json={"messages": asked})).json()["count"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    # A byte is a token, and whole blocks are found.
    assert cached >= (before + len(text.rstrip())) // 64 * 64 > before
