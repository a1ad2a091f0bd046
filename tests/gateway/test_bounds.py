"""What the gateway keeps does not grow with the number of requests."""

import asyncio
import gc
import random
from collections import Counter
from types import SimpleNamespace

import httpx

from services.bus import Bus
from services.gateway.engine_client import STRAYS, EngineClient
from services.gateway.ledger import Ledger
from services.gateway.output.answer import Answer
from services.gateway.output.parser import OutputParser
from services.gateway.sessions.lineage import Lineage
from services.gateway.stream import EventStream, WholeAnswer
from services.gateway.token_stream import TokenStream
from services.protocol import codec, hashing
from services.protocol.generate import TokenBatch, TokenDelta
from tests.gateway.fake_engines import FakeEngines
from tests.gateway.http_gateway import Gateway, gateway

OF_ONE_REQUEST = (Answer, TokenStream, OutputParser, Ledger, EventStream, WholeAnswer)


def _alive() -> Counter[str]:
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, OF_ONE_REQUEST))


async def _of_all_kinds(served: Gateway, engines: FakeEngines, number: int) -> None:
    """Requests that are answered, refused, sent again, left, and for nothing that there is."""
    mark = {"idempotency-key": f"key-{number}", "x-session-id": "one"}
    for stream in (True, False):
        assert (await served.chat(stream=stream)).status_code == 200
        assert (await served.chat(headers=mark, stream=stream)).status_code == 200
    assert (await served.chat(model=f"other-{number}")).status_code == 404
    assert (await served.chat(stop=[""])).status_code == 400
    assert (await served.http.get(f"/nowhere/{number}")).status_code == 404
    assert (await served.http.get(f"/v1/models/other-{number}")).status_code == 404
    say, engines.on_call = engines.on_call, None
    body = {"model": "", "messages": [{"role": "user", "content": "x"}], "stream": True}
    async with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        call = engines.calls[-1]
    await asyncio.wait_for(call.cancelled.wait(), 5)
    engines.on_call = say


def _forget(engines: FakeEngines) -> None:
    engines.calls.clear()
    while not engines._called.empty():
        engines._called.get_nowait()


def test_nothing_of_a_request_is_left_when_it_is_over() -> None:
    async def run() -> None:
        engines = FakeEngines().says("Some <b>text</b>")
        async with gateway(engines) as served:
            for number in range(2):
                await _of_all_kinds(served, engines, number)
            assert await served.deps.open_answers.closed(5)
            _forget(engines)
            await served.http.get("/health/live")  # the responses before are out of the server's hands
            assert _alive() <= before

    before = _alive()  # an earlier test that failed may have left some
    asyncio.run(run())


def test_no_client_can_add_series_to_the_metrics() -> None:
    async def series(http: httpx.AsyncClient) -> set[str]:
        text = (await http.get("/metrics")).text
        return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}

    async def run() -> None:
        engines = FakeEngines().says("text")
        async with gateway(engines) as served:
            await _of_all_kinds(served, engines, 0)
            await series(served.http)
            before = await series(served.http)
            for number in range(1, 4):
                await _of_all_kinds(served, engines, number)
            assert await series(served.http) == before

    asyncio.run(run())


def test_tokens_that_nobody_reads_leave_a_bounded_trace() -> None:
    async def run() -> None:
        client = EngineClient(Bus("nats://127.0.0.1:1", "test"), "gateway")
        for number in range(STRAYS + 100):
            batch = TokenBatch("engine", (TokenDelta(f"request-{number}", 0, (1,)),))
            await client._on_tokens(SimpleNamespace(data=codec.encode(batch)))  # type: ignore[arg-type]
        assert client.counters.stray_deltas == STRAYS + 100
        assert 0 < len(client._strays) <= STRAYS
        assert not client._streams

    asyncio.run(run())


def test_long_salts_are_not_kept() -> None:
    hashing.root("model", "short")
    kept = hashing._kept_root.cache_info().currsize
    salts = [f"{number}" * (hashing.KEPT_SALT + 1) for number in range(10)]
    assert len({hashing.root("model", salt) for salt in salts}) == 10
    assert hashing._kept_root.cache_info().currsize == kept
    assert hashing.root("model", salts[3]) == hashing.root("model", salts[3])


def test_the_lineage_of_any_number_of_sessions_is_bounded() -> None:
    choice = random.Random(4)
    lineage = Lineage(max_blocks=64, max_sessions=16)
    histories: list[list[bytes]] = [[]]
    for number in range(3000):
        history = [*choice.choice(histories)[: choice.randint(0, 8)], number.to_bytes(32, "little")]
        histories = [*histories[-20:], history]
        opening = bytes([choice.randint(0, 3)]) * 16
        if choice.random() < 0.3:
            lineage.named(f"session-{choice.randint(0, 400)}", "header", opening, history)
        else:
            lineage.infer(opening, history)
        assert len(lineage) <= 64
        assert len(lineage._sessions) <= 16
        assert len(lineage._tips) <= 16
