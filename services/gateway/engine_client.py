"""The gateway's way to the engines: requests go out, token streams come back, whatever happens to engines or to NATS.

One subscription for all tokens; its callback only puts deltas into their streams and never awaits. One watch task looks
at every stream some times a second and starts a Recovery where something is missing. All on one event loop.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence

import msgspec
from nats.aio.msg import Msg
from opentelemetry import trace

from services import telemetry
from services.bus import Bus, BusError, MessageTooLarge
from services.gateway.bundles import Bundles
from services.gateway.client_counters import ClientCounters
from services.gateway.dispatch import Dispatch
from services.gateway.engine_errors import EngineError, EngineRejected, NoEngine, RequestTooLarge
from services.gateway.engines import Engine, Engines
from services.gateway.recovery import Recovery
from services.gateway.token_stream import Chunk, TokenStream
from services.protocol import codec, subjects
from services.protocol.events import EngineState, GatewayHeartbeat, ModelCard, SessionNote, TokenizerBundle
from services.protocol.generate import (
    Accepted,
    GenerateRequest,
    Rejected,
    SamplingParams,
    Standing,
    TokenDelta,
    pack_ids,
)

__all__ = [
    "Chunk",
    "ClientCounters",
    "EngineClient",
    "EngineError",
    "EngineRejected",
    "NoEngine",
    "RequestTooLarge",
    "TokenStream",
]

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.25
LATE_SECONDS = 1.0
"""A watch that comes this late means that this process did not get to run: heartbeats wait unread."""
GATEWAY_HEARTBEAT_SECONDS = 2.0
CANCEL_AGAIN_SECONDS = 1.0
CANCEL_SECONDS = 4.0
"""A cancelled stream whose engine does not answer ends by itself after this."""
SNAPSHOT_SECONDS = 2.0
STRAYS = 4096


class EngineClient:
    def __init__(self, bus: Bus, gateway_id: str, resume_timeout: float = 60.0) -> None:
        """Takes over `bus`, which must not be started yet. `gateway_id` must be unique on the bus.

        `resume_timeout`: seconds that a stream waits for another engine when its own is lost.
        """
        if not subjects.valid_id(gateway_id):
            raise ValueError(f"gateway id {gateway_id!r}: letters, digits and - only, 64 at most")
        self.bus = bus
        self.gateway_id = gateway_id
        self.counters = ClientCounters()
        self._streams: dict[str, TokenStream] = {}
        self._engines = Engines()
        self._bundles = Bundles(bus, self._engines)
        self._dispatch = Dispatch(bus, self._streams)
        self._recovery = Recovery(bus, self._engines, self._dispatch, self.counters, resume_timeout)
        self._recovering: dict[TokenStream, asyncio.Task[None]] = {}
        self._snapshots: set[str] = set()
        self._strays: dict[str, float] = {}
        self._watch_task: asyncio.Task[None] | None = None
        self._beaten = 0.0

    async def start(self) -> None:
        """Starts the bus too. Returns at once, also when there is no NATS server: `waiting_for` says so."""
        self.bus.subscribe(subjects.tokens(self.gateway_id), self._on_tokens)
        self.bus.subscribe(subjects.HEARTBEATS, self._on_heartbeat)
        self.bus.subscribe(subjects.BLOCK_EVENTS, self._on_block_events)
        self.bus.on_connected(self._on_connected)
        await self.bus.start()
        self._watch_task = asyncio.create_task(self._watch_for_ever(), name="engine-client-watch")

    async def close(self) -> None:
        """Cancels what still runs, ends its streams, closes the bus. Bounded by some 3 s."""
        tasks = [*self._recovering.values()]
        if self._watch_task is not None:
            tasks.append(self._watch_task)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        for stream in list(self._streams.values()):
            stream.cancel()
            stream.end("cancel")
        self._streams.clear()
        await self.bus.close()

    def models(self) -> list[ModelCard]:
        """One card a served model name, sorted by name; only of engines that are ready."""
        return self._engines.models()

    def states(self) -> dict[str, EngineState]:
        """Of each engine that is heard, by its id."""
        return {engine.engine_id: engine.state for engine in self._engines.all()}

    def known(self, model: str) -> bool:
        """Whether an engine with this model was ever heard: then its absence is a 503 and no 404."""
        return self._engines.known(model)

    def waiting_for(self) -> str:
        """What is missing until a request can be served, for people; empty when ready."""
        if not self.bus.connected:
            return f"no connection to NATS at {self.bus.address}"
        return self._engines.missing()

    async def tokenizer(self, card: ModelCard) -> TokenizerBundle:
        """Kept by digest, so usually at once. Raises NoEngine when no engine can send it."""
        return await self._bundles.get(card)

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
        """Returns when an engine has accepted; raises EngineRejected, NoEngine or RequestTooLarge.

        `request_id`: unique; empty draws one. `tokenizer_digest`: of the tokenizer that made `prompt`; engines with
        another one are left out (while a model is being replaced there may be some). `standing` and `hints`: as
        in GenerateRequest. `span` becomes the parent of the engine's span. When the caller is cancelled meanwhile, so
        is the request.
        """
        request = GenerateRequest(
            request_id=request_id or uuid.uuid4().hex,
            gateway_id=self.gateway_id,
            prompt=pack_ids(prompt),
            sampling=sampling,
            cache_salt=cache_salt,
            session_id=session_id,
            standing=standing,
            hints=tuple(hints),
        )
        stream = TokenStream(request, telemetry.headers(span) if span is not None else None, self._send_cancel)
        engines = self._engines.serving(model)
        if tokenizer_digest:
            engines = [e for e in engines if e.card is not None and e.card.tokenizer_digest == tokenizer_digest]
        if not self.bus.connected or not engines:
            raise NoEngine(f"No engine serves {model!r} just now: {self.waiting_for() or 'others are ready'}.")
        try:
            reply = await self._dispatch.place(stream, engines)
        except MessageTooLarge as error:
            raise RequestTooLarge(error.size, error.limit) from None
        if isinstance(reply, Accepted):
            self._help(stream, time.monotonic())  # it may have lost something or its engine by now
            return stream
        if isinstance(reply, Rejected):
            raise EngineRejected(reply.reason, reply.message, reply.retry_after)
        raise NoEngine(f"No engine of {model!r} answered.")

    def note(self, session_id: str, standing: Standing) -> None:
        """Tell all engines what is to be expected of a session now. Never waits; may get lost."""
        self.bus.post(subjects.SESSION_NOTES, codec.encode(SessionNote(session_id=session_id, standing=standing)))

    def _send_cancel(self, stream: TokenStream) -> None:
        self._dispatch.cancel(stream.engine_id, stream.wire_id)

    async def _on_tokens(self, msg: Msg) -> None:
        batch = codec.token_batch.decode(msg.data)
        now = time.monotonic()
        for delta in batch.deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                self._stray(batch.engine_id, delta, now)
                continue
            if delta.offset > len(stream.output):
                if not stream.gap:
                    self.counters.gaps += 1
            elif delta.tokens and delta.offset < len(stream.output):
                self.counters.duplicates += 1
            stream.accept(delta, now)
            if stream.done:
                del self._streams[delta.request_id]
                if (engine := self._engines.get(stream.engine_id)) is not None:
                    engine.assigned.discard(delta.request_id)
            elif stream.needs_help:
                self._help(stream, now)

    def _stray(self, engine_id: str, delta: TokenDelta, now: float) -> None:
        """Tokens that nobody reads: a Cancel got lost, or a stream went on elsewhere. Stop them, once a second."""
        self.counters.stray_deltas += 1
        if delta.finish is not None or now - self._strays.get(delta.request_id, 0.0) < 1.0:
            return
        if len(self._strays) >= STRAYS:
            self._strays.clear()
        self._strays[delta.request_id] = now
        self._dispatch.cancel(engine_id, delta.request_id)

    async def _on_heartbeat(self, msg: Msg) -> None:
        now = time.monotonic()
        if self._engines.heard(codec.heartbeat.decode(msg.data), now):
            self.counters.engines_lost += 1
            self._check_streams(now)

    async def _on_block_events(self, msg: Msg) -> None:
        events = codec.block_events.decode(msg.data)
        engine = self._engines.get(events.engine_id)
        if engine is not None and engine.incarnation == events.incarnation:
            engine.blocks.apply(events)

    def _on_connected(self) -> None:
        now = time.monotonic()
        self._engines.forgive(now)
        self._beaten = 0.0
        for stream in self._streams.values():
            stream.suspect = stream.placed
        self._check_streams(now)

    async def _watch_for_ever(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = time.monotonic()
            try:
                self._watch(now, late=now - last > LATE_SECONDS)
            except Exception:
                log.exception("watch failed; it goes on")
            last = now

    def _watch(self, now: float, late: bool) -> None:
        if late or not self.bus.connected:
            self._engines.forgive(now)
        else:
            self.counters.engines_lost += len(self._engines.expire(now))
        if now - self._beaten >= GATEWAY_HEARTBEAT_SECONDS and self.bus.connected:
            self._beaten = now
            self.bus.post(subjects.GATEWAY_HEARTBEATS, codec.encode(GatewayHeartbeat(self.gateway_id)))
        self._check_streams(now)
        for engine in self._engines.all():
            if engine.blocks.wants_snapshot and engine.engine_id not in self._snapshots:
                self._snapshots.add(engine.engine_id)
                self.bus.spawn(self._fetch_snapshot(engine))

    async def _fetch_snapshot(self, engine: Engine) -> None:
        try:
            data = await self.bus.request(subjects.blocks(engine.engine_id), b"", SNAPSHOT_SECONDS)
            snapshot = codec.block_snapshot.decode(data)
            if snapshot.incarnation == engine.incarnation:
                engine.blocks.restore(snapshot)
        except (BusError, msgspec.DecodeError) as error:
            log.debug("block snapshot of %s: %s", engine.engine_id, error)
        finally:
            self._snapshots.discard(engine.engine_id)

    def _check_streams(self, now: float) -> None:
        for wire_id, stream in list(self._streams.items()):
            if stream.done:
                self._streams.pop(wire_id, None)
            else:
                self._help(stream, now)

    def _help(self, stream: TokenStream, now: float) -> None:
        """Start what the stream needs: a repeated Cancel, an end, a Recovery."""
        if stream.cancelled_at:
            if now - stream.cancelled_at > CANCEL_SECONDS:
                stream.end("cancel")
                return
            if now - stream.cancel_sent > CANCEL_AGAIN_SECONDS:
                stream.cancel_sent = now
                self._send_cancel(stream)
        if not stream.placed or stream in self._recovering:
            return
        if now - stream.heard > stream.patience or not self.bus.connected:
            stream.suspect = True
        if stream.needs_help or not self._engines.alive(stream.engine_id, stream.incarnation):
            task = asyncio.create_task(self._recovery.recover(stream), name=f"recover-{stream.request_id}")
            self._recovering[stream] = task
            task.add_done_callback(lambda done: self._recovered(stream, done))

    def _recovered(self, stream: TokenStream, task: asyncio.Task[None]) -> None:
        del self._recovering[stream]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("recovery of %s failed", stream.request_id, exc_info=error)
            stream.end("error", "The answer broke off: internal error of the gateway.")
