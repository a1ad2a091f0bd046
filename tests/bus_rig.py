"""Engine servers and gateway clients for tests of the bus: real ones over a real NATS server, with a core that only
counts. `FakeCore` gives each request the tokens `expected(prompt)`, so that any two engines answer alike."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field

from nats.aio.msg import Msg

from services.bus import Bus, Handler
from services.engine.config import EngineConfig
from services.engine.mailbox import (
    CancelRequest,
    Inspect,
    Message,
    NoteSession,
    Sight,
    Snapshot,
    StepResult,
    StepStats,
    Stop,
    Submit,
    Timeline,
)
from services.engine.metrics import EngineMetrics
from services.engine.request import Request
from services.engine.server import EngineServer
from services.engine.tokenizer_chunks import TokenizerChunks
from services.gateway.engine_client import EngineClient
from services.gateway.token_stream import Chunk, TokenStream
from services.protocol.events import EngineLoad, ModelCard, SpecialTokens, TokenizerBundle
from services.protocol.generate import FinishReason, SamplingParams, TokenDelta, Usage

VOCABULARY = 1000
MODEL = "counting"
BUNDLE = TokenizerBundle(tokenizer_json='{"model": {}}', chat_template="", special=SpecialTokens())


def expected(prompt: list[int], count: int, start: int = 0) -> list[int]:
    base = sum(prompt)
    return [(base * 31 + i * 7) % VOCABULARY for i in range(start, count)]


class FakeCore:
    """Consumes the inbox and delivers, as services.engine.core does; one token a step for each running request."""

    def __init__(self, max_running: int = 64, step_seconds: float = 0.002) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.submitted: list[Request] = []
        self.cancelled: list[str] = []
        self.hold_at = 10**9
        """No request gets beyond so many output tokens."""
        self.tokens_per_step = 1
        self.blocks: set[bytes] = set()
        self.notes: list[NoteSession] = []
        self.sight = Sight((), 100, 200)
        """What is said to be cached."""
        self._max_running = max_running
        self._step_seconds = step_seconds
        self._active: dict[str, Request] = {}
        self._fatal = ""
        self._crash: BaseException | None = None
        self._changes: list[tuple[tuple[bytes, ...], tuple[bytes, ...]]] = []
        self._told = EngineLoad()
        self._deliver: Callable[[StepResult], None] = lambda result: None

    def attach(self, deliver: Callable[[StepResult], None]) -> "FakeCore":
        self._deliver = deliver
        return self

    def fail(self, error: str) -> None:
        """The device breaks at the next step: a fatal result, as the real core delivers it."""
        self._fatal = error

    def crash(self, error: BaseException) -> None:
        """The loop itself breaks."""
        self._crash = error

    def change_blocks(self, stored: Set[bytes], removed: Set[bytes] = frozenset()) -> None:
        self._changes.append((tuple(stored), tuple(removed)))

    def run(self) -> None:
        while True:
            began = time.monotonic()
            snapshot = False
            try:
                message = self.inbox.get(timeout=self._step_seconds)
                while True:
                    match message:
                        case Submit(request):
                            self.submitted.append(request)
                            self._active[request.request_id] = request
                        case CancelRequest(request_id):
                            self.cancelled.append(request_id)
                            self._end(request_id, "cancel")
                        case Snapshot():
                            snapshot = True
                        case NoteSession():
                            self.notes.append(message)
                        case Inspect():
                            self._send([], sight=self.sight)
                        case Stop():
                            return
                        case _:
                            raise AssertionError(message)
                    message = self.inbox.get_nowait()
            except queue.Empty:
                pass
            if self._crash is not None:
                raise self._crash
            if self._fatal:
                deltas = [(r.gateway_id, self._final(r, "error", self._fatal)) for r in self._active.values()]
                self._send(deltas, fatal=self._fatal)
                return
            self._step(snapshot)
            time.sleep(max(0.0, self._step_seconds - (time.monotonic() - began)))

    def _step(self, snapshot: bool) -> None:
        deltas: list[tuple[str, TokenDelta]] = []
        finished: list[Timeline] = []
        for request in list(self._active.values())[: self._max_running]:
            start = len(request.output)
            limit = request.sampling.max_tokens
            end = min(start + self.tokens_per_step, self.hold_at, limit)
            fresh = expected(request.prompt, end, start)
            finish: FinishReason | None = None
            for count, token in enumerate(fresh, 1):
                if token in request.sampling.stop_token_ids:
                    fresh, finish = fresh[:count], "stop"
                    break
            request.output.extend(fresh)
            if finish is None and len(request.output) >= limit:
                finish = "length"
            if finish is not None:
                deltas.append((request.gateway_id, self._final(request, finish, "", start, tuple(fresh))))
                finished.append(self._line(request, finish))
                del self._active[request.request_id]
            elif fresh:
                deltas.append((request.gateway_id, TokenDelta(request.request_id, start, tuple(fresh))))
        changes, self._changes = self._changes, []
        for stored, removed in changes:
            self.blocks.difference_update(removed)
            self.blocks.update(stored)
            self._send([], stored=stored, removed=removed)
        if deltas or snapshot or self._load() != self._told:
            self._send(deltas, finished=finished, snapshot=tuple(sorted(self.blocks)) if snapshot else None)

    def _end(self, request_id: str, finish: FinishReason) -> None:
        if (request := self._active.pop(request_id, None)) is not None:
            self._send([(request.gateway_id, self._final(request, finish))], finished=[self._line(request, finish)])

    def _usage(self, request: Request) -> Usage:
        return Usage(
            prompt_tokens=len(request.prompt),
            output_tokens=len(request.output),
            cached_device=len(request.prompt) + request.resumed if request.resumed else 0,
        )

    def _final(
        self,
        request: Request,
        finish: FinishReason,
        error: str = "",
        offset: int | None = None,
        tokens: tuple[int, ...] = (),
    ) -> TokenDelta:
        at = len(request.output) if offset is None else offset
        return TokenDelta(request.request_id, at, tokens, finish, self._usage(request), error)

    def _line(self, request: Request, finish: FinishReason) -> Timeline:
        now = time.time_ns()
        return Timeline(request.request_id, request.arrived, 0, 0, now, now, now, finish, self._usage(request))

    def _send(
        self,
        deltas: list[tuple[str, TokenDelta]],
        finished: list[Timeline] | None = None,
        snapshot: tuple[bytes, ...] | None = None,
        stored: tuple[bytes, ...] = (),
        removed: tuple[bytes, ...] = (),
        fatal: str = "",
        sight: Sight | None = None,
    ) -> None:
        load = self._told = self._load()
        self._deliver(
            StepResult(
                tuple(deltas),
                load,
                StepStats(rows=len(deltas)),
                tuple(finished or ()),
                stored,
                removed,
                snapshot,
                fatal,
                sight=sight,
            )
        )

    def _load(self) -> EngineLoad:
        running = min(len(self._active), self._max_running)
        return EngineLoad(running=running, waiting=len(self._active) - running, pages_total=100, pages_free=50)


class LossyBus(Bus):
    """A bus whose incoming messages a test can look at, drop, repeat or keep back: `filter` returns those to handle."""

    def __init__(self, url: str, name: str) -> None:
        super().__init__(url, name)
        self.filter: Callable[[Msg], list[Msg]] = lambda msg: [msg]

    def subscribe(self, subject: str, handler: Handler) -> None:
        async def filtered(msg: Msg) -> None:
            for kept in self.filter(msg):
                await handler(kept)

        super().subscribe(subject, filtered)


@dataclass
class Engine:
    server: EngineServer
    core: FakeCore
    bus: LossyBus
    metrics: EngineMetrics
    gone: bool = False

    async def kill(self) -> None:
        """As `kill -9` looks from outside: nothing more is sent or answered."""
        self.gone = True
        for task in self.server._tasks:
            task.cancel()
        await asyncio.gather(*self.server._tasks, return_exceptions=True)
        client, self.bus._client = self.bus._client, None
        if client is not None:
            await client.close()
        await self.bus.close()
        self.core.inbox.put(Stop())
        if (thread := self.server._thread) is not None:
            await asyncio.to_thread(thread.join, 5)

    async def drain(self, timeout: float = 0.0) -> None:
        self.gone = True
        await self.server.drain(timeout)


@dataclass
class Rig:
    """Everything that a test started, for the end of the test."""

    url: str
    engines: list[Engine] = field(default_factory=list)
    clients: list[EngineClient] = field(default_factory=list)

    async def engine(
        self,
        engine_id: str = "engine-0",
        *,
        max_running: int = 64,
        max_queue: int = 256,
        replay_ttl: float = 30.0,
        max_model_len: int = 4096,
        fingerprint: str = "f",
        bundle: TokenizerBundle = BUNDLE,
        serve: bool = True,
        connected: bool = True,
        hold_at: int = 10**9,
    ) -> Engine:
        """`connected`: return when it listens."""
        config = EngineConfig(
            engine_id=engine_id,
            nats_url=self.url,
            max_running=max_running,
            max_queue=max_queue,
            replay_ttl=replay_ttl,
        )
        bus = LossyBus(self.url, engine_id)
        metrics = EngineMetrics()
        server = EngineServer(config, bus, metrics)
        core = FakeCore(max_running)
        core.hold_at = hold_at
        engine = Engine(server, core, bus, metrics)
        self.engines.append(engine)
        await server.start()
        if serve:
            self.serve(engine, max_model_len=max_model_len, fingerprint=fingerprint, bundle=bundle)
        if connected:
            await asyncio.wait_for(bus.wait_connected(), 10)
        return engine

    def serve(
        self,
        engine: Engine,
        *,
        max_model_len: int = 4096,
        fingerprint: str = "f",
        bundle: TokenizerBundle = BUNDLE,
    ) -> None:
        chunks = TokenizerChunks(bundle)
        card = ModelCard(
            name=MODEL,
            fingerprint=fingerprint,
            max_model_len=max_model_len,
            block_tokens=64,
            vocab_size=VOCABULARY,
            tokenizer_digest=chunks.digest,
            created=1,
        )
        engine.server.serve(card, chunks, engine.core.inbox, engine.core.attach)

    async def client(self, gateway_id: str = "gw", resume_timeout: float = 20.0) -> EngineClient:
        client = EngineClient(LossyBus(self.url, gateway_id), gateway_id, resume_timeout)
        self.clients.append(client)
        await client.start()
        return client

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        for engine in self.engines:
            if not engine.gone:
                await engine.drain()


def sampling(max_tokens: int = 20, **rest: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **rest)  # type: ignore[arg-type]


async def read_all(stream: TokenStream, seconds: float = 30.0) -> tuple[list[int], Chunk]:
    """All tokens and the last chunk."""
    tokens: list[int] = []
    async with asyncio.timeout(seconds):
        while True:
            chunk = await stream.next()
            tokens += chunk.tokens
            if chunk.finish is not None:
                return tokens, chunk


async def read_until(stream: TokenStream, count: int, seconds: float = 30.0) -> list[int]:
    """At least `count` tokens."""
    tokens: list[int] = []
    async with asyncio.timeout(seconds):
        while len(tokens) < count:
            chunk = await stream.next()
            assert chunk.finish is None, chunk
            tokens += chunk.tokens
    return tokens


def threads_left() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "core"]
