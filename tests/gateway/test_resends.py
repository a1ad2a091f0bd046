"""A request that is sent again while it runs: one run of the engine, and the newcomer gets all of the answer."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.gateway.fake_engines import WAIT
from tests.gateway.http_gateway import HELLO, content, events, gateway

CLAUDE = {"x-claude-code-session-id": "c"}


async def until(lines: AsyncIterator[str], text: str) -> None:
    async def read() -> None:
        async for line in lines:
            if text in line:
                return

    await asyncio.wait_for(read(), WAIT)


@pytest.mark.parametrize("headers", [CLAUDE, {"thread-id": "t"}, {"idempotency-key": "k"}])
@pytest.mark.parametrize("streams", [True, False])
async def test_the_newcomer_takes_the_answer_over(headers: dict[str, str], streams: bool) -> None:
    async with gateway() as g:
        asked = asyncio.create_task(g.chat(headers, stream=streams, temperature=1))
        call = await g.engines.called()
        call.say("Hello, ")
        again = asyncio.create_task(g.chat(headers, stream=streams, temperature=1))
        earlier = await asyncio.wait_for(asked, WAIT)  # it is told, and ends
        assert "sent again" in earlier.text
        assert earlier.status_code == (200 if streams else 410)
        call.say("world")
        call.finish()
        later = await asyncio.wait_for(again, WAIT)
        if streams:
            assert content(events(later.text)) == "Hello, world"
        else:
            assert later.json()["choices"][0]["message"]["content"] == "Hello, world"
        assert len(g.engines.calls) == 1
        assert not call.cancelled.is_set()
        assert await g.sample("prompt_tokens_total") == len(call.prompt)
        assert await g.sample("streams_open") == 0


async def test_the_sdks_say_that_they_try_again() -> None:
    async with gateway() as g:
        asked = asyncio.create_task(g.chat({"x-stainless-retry-count": "0"}))
        call = await g.engines.called()
        again = asyncio.create_task(g.chat({"x-stainless-retry-count": "1"}))
        assert (await asyncio.wait_for(asked, WAIT)).status_code == 410
        third = asyncio.create_task(g.chat({"x-stainless-retry-count": "2"}))
        assert (await asyncio.wait_for(again, WAIT)).status_code == 410
        call.say("x")
        call.finish()
        assert (await asyncio.wait_for(third, WAIT)).json()["choices"][0]["message"]["content"] == "x"
        assert len(g.engines.calls) == 1


@pytest.mark.parametrize(
    ("first", "second", "fields"),
    [
        ({}, {}, {}),  # two samples
        ({"x-session-id": "s"}, {"x-session-id": "s"}, {}),
        (CLAUDE, {"x-claude-code-session-id": "d"}, {}),
        (CLAUDE, {**CLAUDE, "x-claude-code-agent-id": "a"}, {}),
        (CLAUDE, {**CLAUDE, "authorization": "Bearer other"}, {}),
        (CLAUDE, CLAUDE, {"temperature": 0.5}),
    ],
)
async def test_what_is_not_the_same_runs_by_itself(
    first: dict[str, str], second: dict[str, str], fields: dict[str, Any]
) -> None:
    async with gateway() as g:
        asked = [asyncio.create_task(g.chat(first)), asyncio.create_task(g.chat(second, **fields))]
        for _ in asked:
            call = await g.engines.called()
            call.say("x")
            call.finish()
        assert [response.status_code for response in await asyncio.gather(*asked)] == [200, 200]


async def test_the_earlier_client_may_leave_without_harm() -> None:
    async with gateway() as g:
        request = g.http.build_request("POST", "/v1/chat/completions", json={**HELLO, "stream": True}, headers=CLAUDE)
        earlier = await g.http.send(request, stream=True)
        call = await g.engines.called()
        call.say("Hello")
        lines = earlier.aiter_lines()
        await until(lines, "Hello")
        again = asyncio.create_task(
            g.http.post("/v1/chat/completions", content=request.content, headers=request.headers)
        )
        await until(lines, "sent again")
        await earlier.aclose()
        call.finish()
        assert content(events((await asyncio.wait_for(again, WAIT)).text)) == "Hello"
        assert not call.cancelled.is_set()


async def test_an_answer_that_is_over_or_left_is_not_joined() -> None:
    async with gateway() as g:
        for _ in range(2):
            asked = asyncio.create_task(g.chat(CLAUDE))
            call = await g.engines.called()
            call.say("x")
            call.finish()
            assert (await asked).status_code == 200
        g.engines.answer_cancel = False
        left = asyncio.create_task(g.chat(CLAUDE))
        call = await g.engines.called()
        left.cancel()
        await asyncio.wait_for(call.cancelled.wait(), WAIT)
        again = asyncio.create_task(g.chat(CLAUDE))
        call = await g.engines.called()
        call.say("y")
        call.finish()
        assert (await again).status_code == 200
        g.engines.calls[2].finish("cancel")


async def test_a_reader_that_was_busy_takes_nothing_from_its_successor() -> None:
    async with gateway() as g:
        asked = asyncio.create_task(g.chat(CLAUDE, stream=True))
        call = await g.engines.called()
        (earlier,) = g.deps.open_answers._open
        call.say("Hello")
        stream = earlier.hand_over()
        delta = await earlier.next()
        assert (delta.pieces, delta.finish) == ([], "cancel")
        assert (await stream.next()).tokens == list(b"Hello")
        assert "sent again" in (await asyncio.wait_for(asked, WAIT)).text
        call.finish()
