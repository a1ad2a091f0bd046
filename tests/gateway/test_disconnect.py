"""A client that leaves, in whatever phase, stops the engine at once and is nobody's error."""

import asyncio
import json
import logging

import pytest

from tests.gateway.fake_engines import FakeEngines
from tests.gateway.http_gateway import HELLO, Gateway, gateway

WAIT = 5.0


async def post(g: Gateway, body: dict, headers: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A chat over a bare connection, so that a test decides how it ends."""
    host, _, port = g.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n{headers}\r\n"
    writer.write(head.encode() + data)
    return reader, writer


async def gone(g: Gateway) -> None:
    """Until no answer is open."""
    assert await g.deps.open_answers.closed(WAIT)


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with RST."""
    writer.transport.abort()


def close(writer: asyncio.StreamWriter) -> None:
    writer.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave", [close, reset])
async def test_in_the_queue_or_in_prefill(stream: bool, leave: object, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with gateway() as g:
        _, writer = await post(g, {**HELLO, "stream": stream, "session_id": "s"})
        call = await g.engines.called()
        leave(writer)  # type: ignore[operator]
        await asyncio.wait_for(call.cancelled.wait(), WAIT)
        await gone(g)
        assert await g.sample("disconnects_total", phase="before_first_token") == 1
        assert await g.deps.sessions.flush(WAIT)
        detail = await g.deps.sessions.session("s", 1)
        assert detail is not None
        assert (detail.requests[0].status, detail.requests[0].finish_reason) == (499, "cancel")
        # The engine's last word counts: what it had computed is known.
        assert detail.requests[0].cached_device == 8
    assert "status=499" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("stream", [True, False])
async def test_in_decode(stream: bool) -> None:
    async with gateway() as g:
        reader, writer = await post(g, {**HELLO, "stream": stream})
        call = await g.engines.called()
        call.say("Hello")
        if stream:
            async with asyncio.timeout(WAIT):
                while b"Hello" not in await reader.readline():
                    pass
        else:
            await asyncio.sleep(0)
        assert not call.cancelled.is_set()
        close(writer)
        await asyncio.wait_for(call.cancelled.wait(), WAIT)
        await gone(g)
        assert await g.sample("disconnects_total", phase="decode") == 1
        assert await g.sample("output_tokens_total") == 5


async def test_an_engine_that_does_not_answer_the_cancel_leaves_nothing_open() -> None:
    engines = FakeEngines()
    engines.answer_cancel = False
    async with gateway(engines) as g:
        _, writer = await post(g, {**HELLO, "stream": True})
        call = await g.engines.called()
        close(writer)
        await asyncio.wait_for(call.cancelled.wait(), WAIT)
        assert len(g.deps.open_answers) == 1
        call.stream.end("cancel")  # as EngineClient does after some seconds
        await gone(g)


async def test_others_go_on() -> None:
    async with gateway() as g:
        asked = asyncio.create_task(g.chat(stream=True))
        staying = await g.engines.called()
        staying.say("One ")
        _, writer = await post(g, {**HELLO, "stream": True})
        leaving = await g.engines.called()
        close(writer)
        await asyncio.wait_for(leaving.cancelled.wait(), WAIT)
        staying.say("two")
        staying.finish()
        assert '"two"' in (await asked).text
        assert not staying.cancelled.is_set()


async def test_an_answer_that_ended_is_no_disconnect() -> None:
    async with gateway(FakeEngines().says("Hello")) as g:
        for stream in (True, False):
            reader, writer = await post(g, {**HELLO, "stream": stream}, "connection: close\r\n")
            await asyncio.wait_for(reader.read(), WAIT)
            close(writer)
        await gone(g)
        assert await g.sample("finished_total", reason="stop") == 2
        for phase in ("before_first_token", "decode"):
            assert await g.sample("disconnects_total", phase=phase) == 0
        assert not any(call.cancelled.is_set() for call in g.engines.calls)


async def test_while_the_body_is_still_sent(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway() as g:
        host, _, port = g.url.removeprefix("http://").rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b'POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"messages"')
        await writer.drain()
        assert (await g.http.get("/health/live")).status_code == 200  # the other request is being read
        close(writer)
        async with asyncio.timeout(WAIT):
            while not await g.sample(  # noqa: ASYNC110  the other side of a socket gives no event
                "requests_total", route="/v1/chat/completions", status="499"
            ):
                await asyncio.sleep(0.005)
        assert g.engines.calls == []
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_client_that_does_not_read_does_not_hold_up_the_others() -> None:
    async with gateway() as g:
        _, writer = await post(g, {**HELLO, "stream": True})
        deaf = await g.engines.called()
        for _ in range(50):
            deaf.say("x" * 100_000)
            await asyncio.sleep(0)
        g.engines.says("fine")
        assert '"fine"' in (await g.chat(stream=True)).text
        reset(writer)
        await asyncio.wait_for(deaf.cancelled.wait(), WAIT)
        await gone(g)
