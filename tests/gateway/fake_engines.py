"""EngineClient's interface over real TokenStreams, with the test in the place of the engines.

The model's vocabulary is the 256 bytes and a few special tokens, so that a token of a test's text is one byte.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from opentelemetry import trace
from tokenizers.pre_tokenizers import ByteLevel

from services.bus import BusCounters, NoReply
from services.gateway.client_counters import ClientCounters
from services.gateway.engine_errors import EngineError, NoEngine
from services.gateway.output.token_bytes import _BYTE_OF
from services.gateway.token_stream import TokenStream
from services.protocol import codec, subjects
from services.protocol.events import CacheTree, EngineState, ModelCard, SpecialTokens, TokenizerBundle
from services.protocol.generate import (
    FinishReason,
    GenerateRequest,
    SamplingParams,
    Standing,
    TokenDelta,
    Usage,
    pack_ids,
)

MODEL = "bytes-1b"
START, END = 256, 257
WAIT = 5.0

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_json() -> str:
    vocab = {char: _BYTE_OF[char] for char in ByteLevel.alphabet()}
    special = {"<|im_start|>": START, "<|im_end|>": END}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {
                    "id": id,
                    "content": content,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
                for content, id in special.items()
            ],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        }
    )


def bundle(template: str = TEMPLATE, **fields: object) -> TokenizerBundle:
    special = SpecialTokens(stop_ids=(END,), tokens={"eos_token": "<|im_end|>"})
    return TokenizerBundle(tokenizer_json=tokenizer_json(), chat_template=template, special=special, **fields)


def card(name: str = MODEL, max_model_len: int = 4096, digest: str = "bytes") -> ModelCard:
    return ModelCard(
        name=name,
        fingerprint=f"fingerprint-of-{name}",
        max_model_len=max_model_len,
        block_tokens=64,
        vocab_size=258,
        tokenizer_digest=digest,
        created=1_700_000_000,
    )


@dataclass
class Call:
    model: str
    prompt: list[int]
    sampling: SamplingParams
    cache_salt: str
    session_id: str
    span: trace.Span | None
    stream: TokenStream
    cancelled: asyncio.Event

    def say(self, text: str | bytes | Sequence[int], cached: int | None = None) -> None:
        """The engine produces the bytes of a text, or these tokens; with `cached` as with its first ones."""
        data = text.encode() if isinstance(text, str) else text
        delta = TokenDelta(self.stream.request_id, len(self.stream.output), tuple(data), cached=cached)
        self.stream.accept(delta, now=0.0)

    def finish(self, reason: FinishReason = "stop", error: str = "", **usage: float) -> None:
        tokens = (END,) if reason == "stop" else ()
        self._deliver(tokens, reason, error, **usage)

    def _deliver(self, tokens: tuple[int, ...], finish: FinishReason | None = None, error: str = "", **usage) -> None:
        offset = len(self.stream.output)
        last = None
        if finish is not None:
            last = Usage(prompt_tokens=len(self.prompt), output_tokens=offset + len(tokens), **usage)
        self.stream.accept(TokenDelta(self.stream.request_id, offset, tokens, finish, last, error), now=0.0)


class FakeEngines:
    """`on_call` plays the engine; without it a test uses `await called()` and speaks by hand."""

    def __init__(self, cards: Sequence[ModelCard] | None = None, text_side: TokenizerBundle | None = None) -> None:
        self.counters = ClientCounters()
        self.bus = SimpleNamespace(counters=BusCounters(), request=self._request)
        self.trees: dict[str, CacheTree] = {}
        """Of the engines that answer; there are others."""
        self.cards = [card()] if cards is None else list(cards)
        self.text_side = text_side or bundle()
        self.missing = "" if self.cards else "no engine has been heard"
        self.names = {c.name for c in self.cards}
        self.refusal: EngineError | None = None
        self.on_call: Callable[[Call], None] | None = None
        self.answer_cancel = True
        self.fetched = 0
        self.calls: list[Call] = []
        self.notes: list[tuple[str, Standing]] = []
        self._noted: asyncio.Queue[tuple[str, Standing]] = asyncio.Queue()
        self.running: list[str] = []
        self._called: asyncio.Queue[Call] = asyncio.Queue()

    def says(self, text: str | bytes, reason: FinishReason = "stop", **usage: float) -> "FakeEngines":
        """Each request is answered with this text at once."""

        def play(call: Call) -> None:
            call.say(text)
            call.finish(reason, **usage)

        self.on_call = play
        return self

    async def called(self) -> Call:
        """The next request that reaches the engines."""
        return await asyncio.wait_for(self._called.get(), WAIT)

    def note(self, session_id: str, standing: Standing) -> None:
        self.notes.append((session_id, standing))
        self._noted.put_nowait((session_id, standing))

    async def noted(self) -> tuple[str, Standing]:
        """The next note."""
        return await asyncio.wait_for(self._noted.get(), WAIT)

    async def start(self) -> None:
        self.running.append("started")

    async def close(self) -> None:
        self.running.append("closed")

    def models(self) -> list[ModelCard]:
        return self.cards

    def states(self) -> dict[str, EngineState]:
        return {"engine-0": "ready", "engine-1": "ready", "engine-2": "loading"}

    async def _request(self, subject: str, data: bytes, timeout: float) -> bytes:
        for engine_id, tree in self.trees.items():
            if subject == subjects.cache(engine_id):
                return codec.encode(tree)
        raise NoReply(f"no reply on {subject} within {timeout:g} s")

    def known(self, model: str) -> bool:
        return model in self.names

    def waiting_for(self) -> str:
        return self.missing

    async def tokenizer(self, card: ModelCard) -> TokenizerBundle:
        self.fetched += 1
        if self.missing:
            raise NoEngine(self.missing)
        return self.text_side

    async def generate(
        self,
        model: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str = "",
        cache_salt: str = "",
        session_id: str = "",
        standing: Standing = "idle",
        tokenizer_digest: str = "",
        hints: Sequence[int] = (),
        span: trace.Span | None = None,
    ) -> TokenStream:
        if self.refusal is not None:
            raise self.refusal
        request = GenerateRequest(
            request_id=request_id,
            gateway_id="gateway",
            prompt=pack_ids(prompt),
            sampling=sampling,
            session_id=session_id,
            hints=tuple(hints),
            standing=standing,
        )
        cancelled = asyncio.Event()

        def on_cancel(stream: TokenStream) -> None:
            cancelled.set()
            if self.answer_cancel:
                call.finish("cancel", cached_device=8)

        stream = TokenStream(request, None, on_cancel)
        stream.engine_id = "engine-0"
        call = Call(model, list(prompt), sampling, cache_salt, session_id, span, stream, cancelled)
        self.calls.append(call)
        self._called.put_nowait(call)
        if self.on_call is not None:
            self.on_call(call)
        return stream
