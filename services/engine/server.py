"""The engine's end of the bus: NATS messages in, inbox messages out; step results in, NATS messages out.

Lives on the event loop; the core runs on a thread of its own and meets it at two places only: the inbox (a queue) and
`deliver` (which hands a StepResult to the loop). Serves from the first moment: while the model loads, heartbeats tell
how far it is and requests are refused with a reason.
"""

import asyncio
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable
from typing import Protocol

import msgspec
from nats.aio.msg import Msg
from opentelemetry.trace import Span

from services import telemetry
from services.bus import Bus
from services.engine import request_trace
from services.engine.admission import Admission, Refused, admit
from services.engine.block_feed import BlockFeed
from services.engine.config import EngineConfig
from services.engine.gateway_watch import GatewayWatch
from services.engine.mailbox import CancelRequest, Message, NoteSession, StepResult, Stop, Submit
from services.engine.metrics import EngineMetrics
from services.engine.outbox import Outbox
from services.engine.replay import ReplayBuffer
from services.engine.request import Request
from services.engine.tokenizer_chunks import TokenizerChunks
from services.engine.tree_answers import TreeAnswers
from services.protocol import codec, subjects
from services.protocol.events import (
    HEARTBEAT_SECONDS,
    EngineLoad,
    EngineState,
    Heartbeat,
    ModelCard,
)
from services.protocol.generate import Accepted, GenerateReply, ResumeReply, TokenDelta, unpack_ids

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""For the final deltas of cancelled requests, and again for the core's thread to end."""
LATE_SECONDS = 1.0
"""A heartbeat that comes this late means that this process did not get to run: gateways' heartbeats wait unread."""


class Core(Protocol):
    """services.engine.core.EngineCore."""

    def run(self) -> None: ...


class EngineServer:
    def __init__(self, config: EngineConfig, bus: Bus, metrics: EngineMetrics) -> None:
        """Takes over `bus`, which must not be started yet."""
        self.engine_id = config.engine_id
        self.incarnation = uuid.uuid4().hex
        self.state: EngineState = "loading"
        self.failed = asyncio.Event()
        """The core has ended on an error: the process should go, its supervisor makes a new one."""
        self._config = config
        self._bus = bus
        self._metrics = metrics
        self._inbox: queue.SimpleQueue[Message] | None = None
        self._thread: threading.Thread | None = None
        self._card: ModelCard | None = None
        self._chunks: TokenizerChunks | None = None
        self._progress = 0.0
        self._detail = ""
        self._load = EngineLoad(queue_capacity=config.max_queue)
        self._admission = Admission(config.max_running, config.max_queue)
        self._replay = ReplayBuffer(config.replay_ttl)
        self._outbox = Outbox(bus, config.engine_id)
        self._feed = BlockFeed(bus, self._outbox, config.engine_id, self.incarnation)
        self._trees = TreeAnswers(bus, config.engine_id)
        self._gateways = GatewayWatch()
        self._spans: dict[str, Span] = {}
        self._resumed: dict[str, int] = {}
        self._drained = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    # Life, in order: start, (progress ...), serve, drain.

    async def start(self) -> None:
        """Connect in the background and announce the state `loading`."""
        for subject, handler in (
            (subjects.generate(self.engine_id), self._on_generate),
            (subjects.cancel(self.engine_id), self._on_cancel),
            (subjects.resume(self.engine_id), self._on_resume),
            (subjects.tokenizer(self.engine_id), self._on_tokenizer),
            (subjects.blocks(self.engine_id), self._on_blocks),
            (subjects.cache(self.engine_id), self._on_cache),
            (subjects.SESSION_NOTES, self._on_session_note),
            (subjects.GATEWAY_HEARTBEATS, self._on_gateway_heartbeat),
        ):
            self._bus.subscribe(subject, handler)
        self._bus.on_connected(self._on_connected)
        await self._bus.start()
        self._tasks = [
            asyncio.create_task(self._beat_for_ever(), name="heartbeat"),
            asyncio.create_task(self._outbox.run(), name="outbox"),
        ]

    def progress(self, fraction: float, detail: str) -> None:
        """How far loading is, 0 to 1, and what is loaded just now. From any thread."""
        self._progress, self._detail = fraction, detail

    def serve(
        self,
        card: ModelCard,
        chunks: TokenizerChunks,
        inbox: "queue.SimpleQueue[Message]",
        core: Callable[[Callable[[StepResult], None]], Core],
    ) -> None:
        """The model is loaded: run `core(deliver)` on a thread and accept requests. `card` names `chunks`' digest."""
        self._card, self._chunks, self._inbox = card, chunks, inbox
        self._feed.attach(inbox)
        self._trees.attach(inbox)
        loop = asyncio.get_running_loop()

        def deliver(result: StepResult) -> None:
            loop.call_soon_threadsafe(self._on_result, result)

        def run() -> None:
            try:
                core(deliver).run()
            except BaseException as error:
                log.exception("the core has ended on an error")
                loop.call_soon_threadsafe(self.fail, f"{type(error).__name__}: {error}")
                raise

        self._thread = threading.Thread(target=run, name="core", daemon=True)
        self._thread.start()
        self._set_state("ready", "")

    async def drain(self, timeout: float) -> None:
        """Accept nothing more, let open requests finish for `timeout` seconds, cancel the rest, stop the core, close.

        A gateway takes a cancel that it did not ask for as an invitation to go on elsewhere.
        """
        if self.state != "failed":
            self._set_state("draining", "")
        await self._wait_drained(timeout)
        if self._replay.open_count and self.state != "failed":
            log.warning("%d requests did not finish in time; cancelling them", self._replay.open_count)
            self._cancel_all(self._replay.open, "drain")
            await self._wait_drained(STOP_SECONDS)
        if self._inbox is not None:
            self._inbox.put(Stop())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, STOP_SECONDS)
            if self._thread.is_alive():
                log.error("the core did not stop within %g s", STOP_SECONDS)
        try:
            await asyncio.wait_for(self._outbox.flush(), STOP_SECONDS)
        except TimeoutError:
            log.error("the last tokens could not be sent")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._bus.close()

    async def _wait_drained(self, timeout: float) -> None:
        self._drained.clear()
        if self._replay.open_count == 0 or self.state == "failed":
            return
        try:
            await asyncio.wait_for(self._drained.wait(), timeout)
        except TimeoutError:
            return

    # From the bus.

    async def _on_generate(self, msg: Msg) -> None:
        await self._bus.respond(msg, codec.encode(self._take(msg)))

    def _take(self, msg: Msg) -> GenerateReply:
        """Submit the request, or say why not. No await in here: whether it was seen before stays true."""
        now = time.monotonic()
        request_id = ""
        try:
            try:
                wire = codec.generate_request.decode(msg.data)
                request_id = wire.request_id
                prompt, generated = unpack_ids(wire.prompt), unpack_ids(wire.generated)
            except (msgspec.DecodeError, ValueError) as error:
                raise Refused("bad_request", f"the request cannot be read: {error}") from None
            if request_id in self._replay:
                return Accepted(request_id, self.engine_id)
            card, inbox = self._ready()
            sampling = admit(wire, prompt, generated, card)
            self._admission.check(self._replay.open_count)
        except Refused as refused:
            self._metrics.rejected(refused.reason)
            return refused.reply(request_id, self._admission.retry_after(now))
        span = request_trace.begin(wire, sampling, card, self.engine_id, telemetry.parent_of(msg.headers))
        self._spans[request_id] = span
        self._replay.begin(request_id, wire.gateway_id, generated)
        if generated:
            self._resumed[request_id] = len(generated)
        self._gateways.heard(wire.gateway_id, now)
        request = Request(
            request_id=request_id,
            gateway_id=wire.gateway_id,
            prompt=prompt,
            output=generated,
            resumed=len(generated),
            sampling=sampling,
            cache_salt=wire.cache_salt,
            session_id=wire.session_id,
            hints=wire.hints,
            standing=wire.standing,
            trace=telemetry.traceparent(span),
        )
        inbox.put(Submit(request))
        return Accepted(request_id, self.engine_id)

    def _ready(self) -> "tuple[ModelCard, queue.SimpleQueue[Message]]":
        if self.state == "ready" and self._card is not None and self._inbox is not None:
            return self._card, self._inbox
        if self.state == "loading":
            raise Refused("loading", f"The model is loading ({self._progress:.0%}): {self._detail or 'starting'}.")
        raise Refused("draining", f"Engine {self.engine_id} is {self.state}.")

    async def _on_cancel(self, msg: Msg) -> None:
        request_id = codec.cancel.decode(msg.data).request_id
        if self._replay.is_open(request_id):
            self._cancel_all([request_id], "client")

    def _cancel_all(self, request_ids: list[str], why: str) -> None:
        for request_id in request_ids:
            if self._inbox is not None:
                self._inbox.put(CancelRequest(request_id))
                self._metrics.cancelled(why)

    async def _on_resume(self, msg: Msg) -> None:
        resume = codec.resume.decode(msg.data)
        delta = self._replay.read(resume.request_id, resume.offset)
        self._metrics.resumed(delta is not None)
        await self._bus.respond(msg, codec.encode(ResumeReply(delta)))

    async def _on_tokenizer(self, msg: Msg) -> None:
        if self._chunks is None:
            return  # the asker has no card of us yet, or it is one of our predecessor: it times out and looks again
        try:
            message = self._chunks.message(int(msg.data))
        except (ValueError, IndexError):
            log.warning("there is no tokenizer chunk %r", msg.data[:20])
            return
        await self._bus.respond(msg, message)

    async def _on_blocks(self, msg: Msg) -> None:
        # Apart: it waits for the core's next step, and other askers must not wait behind it.
        self._bus.spawn(self._feed.answer(msg))

    async def _on_cache(self, msg: Msg) -> None:
        self._bus.spawn(self._trees.answer(msg))

    async def _on_session_note(self, msg: Msg) -> None:
        note = codec.session_note.decode(msg.data)
        if self._inbox is not None:
            self._inbox.put(NoteSession(note.session_id, note.standing))

    async def _on_gateway_heartbeat(self, msg: Msg) -> None:
        self._gateways.heard(codec.gateway_heartbeat.decode(msg.data).gateway_id, time.monotonic())

    def _on_connected(self) -> None:
        # Silence while we were cut off is no gateway's fault.
        self._gateways.forgive(time.monotonic())
        self._bus.spawn(self._beat())

    # From the core.

    def _on_result(self, result: StepResult) -> None:
        if self.state == "failed":
            return
        try:
            self._take_result(result)
        except Exception as error:  # tokens may be lost here: better to start anew than to go on with a hole
            log.exception("a step's result could not be handled")
            self.fail(f"{type(error).__name__}: {error}")

    def _take_result(self, result: StepResult) -> None:
        now = time.monotonic()
        self._load = result.load
        self._metrics.step(result.stats)
        self._metrics.load(result.load)
        self._metrics.states(result.states)
        self._feed.changed(result.stored, result.removed)
        if result.snapshot is not None:
            self._feed.snapshot(result.snapshot)
        if result.sight is not None:
            self._trees.seen(result.sight, result.load, result.states)
        errors: dict[str, str] = {}
        for gateway_id, delta in result.deltas:
            if delta.finish == "error":
                errors[delta.request_id] = delta.error
            if result.fatal and delta.finish == "error":
                continue  # the device failed, not the request: its gateway goes on elsewhere when it sees our state
            self._pass_on(gateway_id, delta, now)
        for line in result.finished:
            self._metrics.finished(line, self._resumed.pop(line.request_id, 0))
            if (span := self._spans.pop(line.request_id, None)) is not None:
                request_trace.end(span, line, errors.get(line.request_id, ""))
        if result.fatal:
            self.fail(result.fatal)
        elif self._replay.open_count == 0:
            self._drained.set()

    def _pass_on(self, gateway_id: str, delta: TokenDelta, now: float) -> None:
        self._replay.add(delta, now)
        if delta.finish is not None:
            self._admission.finished(now)
        if delta.tokens or delta.finish is not None:
            self._outbox.deltas(gateway_id, delta)

    def fail(self, why: str) -> None:
        """The engine can do nothing more (the model could not be loaded, the core has ended): say so and set
        `failed`."""
        if self.state != "failed":
            self._set_state("failed", why)
        self._drained.set()
        self.failed.set()

    # By the clock.

    async def _beat_for_ever(self) -> None:
        last = time.monotonic()
        while True:
            try:
                await self._beat()
                now = time.monotonic()
                if now - last > LATE_SECONDS or not self._bus.connected:
                    self._gateways.forgive(now)
                last = now
                self._replay.expire(now)
                for gateway_id in self._gateways.expire(now):
                    self._abandon(gateway_id)
            except Exception:
                log.exception("heartbeat failed; the next one follows")
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _beat(self) -> None:
        if not self._bus.connected:
            return
        beat = Heartbeat(
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            state=self.state,
            card=self._card,
            load=self._current_load(),
            progress=1.0 if self._card is not None else self._progress,
            detail=self._detail,
            last_event_id=self._feed.event_id,
        )
        await self._bus.publish(subjects.HEARTBEATS, codec.encode(beat))

    def _current_load(self) -> EngineLoad:
        """The core's, with the requests that it has not come to yet."""
        opened = self._replay.open_count
        running = min(self._load.running, opened)
        return msgspec.structs.replace(
            self._load, running=running, waiting=opened - running, queue_capacity=self._config.max_queue
        )

    def _set_state(self, state: EngineState, detail: str) -> None:
        log.info("engine %s is %s%s", self.engine_id, state, f": {detail}" if detail else "")
        self.state, self._detail = state, detail
        self._bus.spawn(self._beat())

    def _abandon(self, gateway_id: str) -> None:
        if orphans := self._replay.open_of(gateway_id):
            log.warning("gateway %s is gone; cancelling its %d requests", gateway_id, len(orphans))
            self._cancel_all(orphans, "gateway_lost")
