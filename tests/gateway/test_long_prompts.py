"""A long prompt is rendered, tokenized and hashed beside the event loop: meanwhile others are served.

Each stage is held in turn. A stage on the event loop would hold the loop, so that the other request could not be
answered before it is let go.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from httpx import Response

from services.gateway.dispatch import HASH_INLINE_TOKENS
from services.gateway.prompt.language import Language
from services.gateway.prompt.template import ChatTemplate
from services.protocol import hashing
from services.protocol.generate import pack_ids
from tests.gateway.fake_engines import FakeEngines, card
from tests.gateway.http_gateway import Gateway, gateway

WAIT = 20.0
LONG = [{"role": "user", "content": "long " * (HASH_INLINE_TOKENS // 4)}]


class Held:
    """A function that long work enters and does not leave before it is let go."""

    def __init__(self, function: Callable[..., Any], is_long: Callable[..., bool]) -> None:
        self.entered = threading.Event()
        self.let_go = threading.Event()
        self.thread = 0
        self._function = function
        self._is_long = is_long

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self._is_long(*args):
            self.thread = threading.get_ident()
            self.entered.set()
            assert self.let_go.wait(WAIT), "nobody else was served meanwhile"
        return self._function(*args, **named)

    def method(self) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            return self(*args, **named)

        return call


def _render(monkeypatch: pytest.MonkeyPatch) -> Held:
    held = Held(ChatTemplate.parts, lambda _, messages, *__: len(messages[0]["content"]) > 10_000)
    monkeypatch.setattr(ChatTemplate, "parts", held.method())
    return held


def _encode(monkeypatch: pytest.MonkeyPatch) -> Held:
    held = Held(Language._ids, lambda _, parts: len(parts[0]) > 10_000)
    monkeypatch.setattr(Language, "_ids", held.method())
    return held


def _hash(monkeypatch: pytest.MonkeyPatch) -> Held:
    held = Held(hashing.chain_packed, lambda _, packed, *__: len(packed) > 10_000)
    monkeypatch.setattr(hashing, "chain_packed", held)
    return held


@pytest.fixture(params=[_render, _encode, _hash], ids=["render", "encode", "hash"])
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    stage: Held = request.param(monkeypatch)
    yield stage
    stage.let_go.set()


async def _ask_beside(served: Gateway, held: Held, request: Coroutine[Any, Any, Response]) -> None:
    """A chat is answered while `request` is held."""
    long = asyncio.create_task(request)
    try:
        assert await asyncio.to_thread(held.entered.wait, WAIT)
        assert (await served.chat()).status_code == 200
        assert not long.done()
    finally:
        held.let_go.set()
    assert (await long).status_code == 200
    assert held.thread != threading.get_ident()


def test_others_are_answered_while_a_long_prompt_is_prepared(held: Held) -> None:
    async def run() -> None:
        engines = FakeEngines([card(max_model_len=1 << 20)]).says("Hi")
        async with gateway(engines) as served:
            await _ask_beside(served, held, served.chat(messages=LONG))
        assert len(engines.calls[-1].prompt) > HASH_INLINE_TOKENS

    asyncio.run(run())


def test_others_are_answered_while_many_ids_are_detokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Held(Language._decode, lambda *_: True)
    monkeypatch.setattr(Language, "_decode", stage.method())

    async def run() -> None:
        async with gateway(FakeEngines().says("Hi")) as served:
            ids = list(b"many ids " * 300)
            await _ask_beside(served, stage, served.http.post("/detokenize", json={"tokens": ids}))
            few = await served.http.post("/detokenize", json={"tokens": list(b"few")})
            assert few.json()["prompt"] == "few"

    asyncio.run(run())


def test_a_short_chat_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with gateway(FakeEngines().says("Hi")) as served:
            assert (await served.chat()).status_code == 200  # loads the tokenizer, on a thread

            def refuse(*_: Any) -> None:
                raise AssertionError("a hop to a thread")

            monkeypatch.setattr(Language, "_on_thread", refuse)
            assert (await served.chat()).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128, 1000])
def test_packed_ids_have_the_names_of_the_ids(count: int) -> None:
    ids = [place * 7919 % 250_000 for place in range(count)]
    root = hashing.root("model", "salt")
    names = hashing.chain_packed(root, pack_ids(ids))
    assert names == list(hashing.chain(root, ids))
    assert len(names) == count // hashing.BLOCK_TOKENS
