"""The engine server over a real NATS server, with a core that only counts."""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import generate_latest

from services import telemetry
from services.engine import gateway_watch, request_trace
from services.engine import server as server_module
from services.engine.mailbox import NoteSession, Sight
from services.engine.tree_answers import newest
from services.protocol import codec, subjects
from services.protocol.events import (
    CachedRun,
    GatewayHeartbeat,
    Heartbeat,
    SessionNote,
    SpecialTokens,
    TokenizerBundle,
)
from services.protocol.generate import (
    Accepted,
    Cancel,
    GenerateReply,
    GenerateRequest,
    Rejected,
    Resume,
    SamplingParams,
    TokenDelta,
    pack_ids,
)
from tests.bus_rig import MODEL, VOCABULARY, Rig, expected, sampling, threads_left
from tests.nats import NatsServer, eventually, nats_server


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    with nats_server() as server:
        yield server


@pytest.fixture
async def rig(nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(server_module, "HEARTBEAT_SECONDS", 0.05)
    rig = Rig(nats.url)
    yield rig
    await rig.close()
    assert threads_left() == []


class Gateway:
    """A gateway made of plain NATS calls, so that the wire is what is tested."""

    def __init__(self, gateway_id: str = "gw") -> None:
        self.gateway_id = gateway_id
        self.nats = Client()
        self.deltas: list[TokenDelta] = []
        self.batches: list[bytes] = []
        self.beats: list[Heartbeat] = []
        self.finals: dict[str, TokenDelta] = {}

    async def connect(self, url: str) -> "Gateway":
        await self.nats.connect(url)
        await self.nats.subscribe(subjects.tokens(self.gateway_id), cb=self._on_tokens)
        await self.nats.subscribe(subjects.HEARTBEATS, cb=self._on_heartbeat)
        await self.nats.flush()
        return self

    async def _on_tokens(self, msg: Msg) -> None:
        self.batches.append(msg.data)
        for delta in codec.token_batch.decode(msg.data).deltas:
            self.deltas.append(delta)
            if delta.finish:
                assert delta.request_id not in self.finals, "two final deltas"
                self.finals[delta.request_id] = delta

    async def _on_heartbeat(self, msg: Msg) -> None:
        self.beats.append(codec.heartbeat.decode(msg.data))

    def request(
        self, request_id: str, prompt: list[int], params: SamplingParams | None = None, generated: tuple[int, ...] = ()
    ) -> GenerateRequest:
        return GenerateRequest(
            request_id=request_id,
            gateway_id=self.gateway_id,
            prompt=pack_ids(prompt),
            sampling=params or sampling(),
            generated=pack_ids(generated),
        )

    async def send(self, request: GenerateRequest | bytes, engine_id: str = "engine-0") -> GenerateReply:
        data = request if isinstance(request, bytes) else codec.encode(request)
        reply = await self.nats.request(subjects.generate(engine_id), data, timeout=5)
        return codec.generate_reply.decode(reply.data)

    async def cancel(self, request_id: str) -> None:
        await self.nats.publish(subjects.cancel("engine-0"), codec.encode(Cancel(request_id)))
        await self.nats.flush()

    async def resume(self, request_id: str, offset: int) -> TokenDelta | None:
        reply = await self.nats.request(
            subjects.resume("engine-0"), codec.encode(Resume(request_id, offset)), timeout=5
        )
        return codec.resume_reply.decode(reply.data).delta

    async def final(self, request_id: str) -> TokenDelta:
        await eventually(lambda: request_id in self.finals, what=f"final delta of {request_id}")
        return self.finals[request_id]

    def tokens(self, request_id: str) -> list[int]:
        """In the order of arrival, which must be that of the offsets."""
        tokens: list[int] = []
        for delta in self.deltas:
            if delta.request_id == request_id:
                assert delta.offset == len(tokens)
                tokens += delta.tokens
        return tokens


@pytest.fixture
async def gateway(nats: NatsServer) -> AsyncIterator[Gateway]:
    gateway = await Gateway().connect(nats.url)
    yield gateway
    await gateway.nats.close()


async def test_a_request_is_accepted_and_streamed_to_its_end(rig: Rig, gateway: Gateway) -> None:
    await rig.engine()
    await eventually(lambda: gateway.beats and gateway.beats[-1].state == "ready")

    assert await gateway.send(gateway.request("r", [1, 2, 3])) == Accepted("r", "engine-0")

    final = await gateway.final("r")
    assert gateway.tokens("r") == expected([1, 2, 3], 20)
    assert final.finish == "length"
    assert final.usage is not None
    assert (final.usage.prompt_tokens, final.usage.output_tokens) == (3, 20)


async def test_heartbeats_tell_loading_progress_before_the_model_is_there(rig: Rig, gateway: Gateway) -> None:
    engine = await rig.engine(serve=False)
    engine.server.progress(0.43, "weights")
    await eventually(lambda: gateway.beats and gateway.beats[-1].progress == 0.43)
    beat = gateway.beats[-1]
    assert (beat.state, beat.detail, beat.card) == ("loading", "weights", None)

    reply = await gateway.send(gateway.request("early", [1]))
    assert isinstance(reply, Rejected)
    assert reply.reason == "loading"
    assert "43%" in reply.message
    assert "weights" in reply.message

    rig.serve(engine)
    await eventually(lambda: gateway.beats[-1].state == "ready")
    card = gateway.beats[-1].card
    assert card is not None
    assert card.name == MODEL
    assert isinstance(await gateway.send(gateway.request("early", [1])), Accepted)


BAD = {
    "empty prompt": ([], sampling(), ()),
    "id beyond the vocabulary": ([VOCABULARY], sampling(), ()),
    "generated beyond the vocabulary": ([1], sampling(), (VOCABULARY,)),
    "no output": ([1], sampling(0), ()),
    "negative temperature": ([1], sampling(temperature=-0.1), ()),
    "temperature NaN": ([1], sampling(temperature=math.nan), ()),
    "temperature infinite": ([1], sampling(temperature=math.inf), ()),
    "top_p 0": ([1], sampling(top_p=0.0), ()),
    "top_p above 1": ([1], sampling(top_p=1.01), ()),
    "top_k negative": ([1], sampling(top_k=-1), ()),
    "min_p above 1": ([1], sampling(min_p=2.0), ()),
    "repetition_penalty 0": ([1], sampling(repetition_penalty=0.0), ()),
    "presence_penalty NaN": ([1], sampling(presence_penalty=math.nan), ()),
    "frequency_penalty huge": ([1], sampling(frequency_penalty=1e9), ()),
    "bias of no token": ([1], sampling(logit_bias={VOCABULARY: 1.0}), ()),
    "bias NaN": ([1], sampling(logit_bias={1: math.nan}), ()),
    "stop id negative": ([1], sampling(stop_token_ids=(-1,)), ()),
    "all generated already": ([1], sampling(2), (5, 6)),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_requests_are_refused_and_never_reach_the_core(rig: Rig, gateway: Gateway, case: str) -> None:
    engine = await rig.engine()
    prompt, params, generated = BAD[case]
    reply = await gateway.send(gateway.request("bad", prompt, params, generated))
    assert isinstance(reply, Rejected)
    assert (reply.request_id, reply.reason) == ("bad", "bad_request")
    assert engine.core.submitted == []
    assert b'samovar_engine_rejected_total{reason="bad_request"} 1.0' in generate_latest(engine.metrics.registry)


async def test_what_is_no_request_is_refused(rig: Rig, gateway: Gateway) -> None:
    await rig.engine()
    ragged = GenerateRequest(request_id="r", gateway_id="gw", prompt=b"\x01\x00\x00", sampling=sampling())
    foreign = GenerateRequest(request_id="r", gateway_id="a.b", prompt=pack_ids([1]), sampling=sampling())
    for message in (b"", b"\xff\x00nonsense", codec.encode({"request_id": 3}), ragged, foreign):
        reply = await gateway.send(message)
        assert isinstance(reply, Rejected)
        assert reply.reason == "bad_request"
    assert isinstance(await gateway.send(gateway.request("good", [1])), Accepted)


async def test_a_prompt_beyond_the_context_is_refused_in_the_words_that_agents_read(rig: Rig, gateway: Gateway) -> None:
    await rig.engine(max_model_len=10)
    reply = await gateway.send(gateway.request("long", [1] * 10))
    assert isinstance(reply, Rejected)
    assert reply.reason == "context_length"
    assert reply.message == (
        "This model's maximum context length is 10 tokens. However, your messages resulted in 10 tokens. Please reduce "
        "the length of the messages (prompt is too long: 10 tokens > 10 maximum)."
    )


async def test_max_tokens_is_clamped_to_what_the_context_holds(rig: Rig, gateway: Gateway) -> None:
    engine = await rig.engine(max_model_len=10)
    await gateway.send(gateway.request("r", [1] * 4, sampling(100)))
    assert (await gateway.final("r")).finish == "length"
    assert engine.core.submitted[0].sampling.max_tokens == 6
    assert len(gateway.tokens("r")) == 6


async def test_100_requests_at_once_on_a_queue_of_8(rig: Rig, gateway: Gateway) -> None:
    engine = await rig.engine(max_running=4, max_queue=8, hold_at=0)
    replies = await asyncio.gather(*(gateway.send(gateway.request(f"r{i}", [i + 1])) for i in range(100)))
    accepted = [r for r in replies if isinstance(r, Accepted)]
    rejected = [r for r in replies if isinstance(r, Rejected)]
    assert (len(accepted), len(rejected)) == (12, 88)
    assert all(r.reason == "overloaded" and r.retry_after >= 1 for r in rejected)
    await eventually(lambda: gateway.beats and gateway.beats[-1].load.waiting == 8)
    assert gateway.beats[-1].load.running == 4
    assert gateway.beats[-1].load.queue_capacity == 8

    engine.core.hold_at = 10**9
    for reply in accepted:
        assert (await gateway.final(reply.request_id)).finish == "length"
    assert isinstance(await gateway.send(gateway.request("after", [1])), Accepted)


async def test_a_request_sent_again_is_accepted_and_not_run_again(rig: Rig, gateway: Gateway) -> None:
    engine = await rig.engine(max_running=1, max_queue=0, hold_at=3)
    request = gateway.request("r", [1, 2])
    for _ in range(3):  # also while the engine is full
        assert await gateway.send(request) == Accepted("r", "engine-0")
    engine.core.hold_at = 10**9
    await gateway.final("r")
    assert await gateway.send(request) == Accepted("r", "engine-0")
    assert len(engine.core.submitted) == 1
    assert gateway.tokens("r") == expected([1, 2], 20)


async def test_cancel_is_idempotent_and_answered_by_one_final_delta(rig: Rig, gateway: Gateway) -> None:
    engine = await rig.engine(max_running=1, hold_at=3)
    await gateway.send(gateway.request("running", [1]))
    await gateway.send(gateway.request("queued", [2]))
    await eventually(lambda: len(gateway.tokens("running")) == 3)
    await gateway.cancel("unknown")
    for _ in range(3):
        await gateway.cancel("queued")
        await gateway.cancel("running")
    for name, count in (("running", 3), ("queued", 0)):
        final = await gateway.final(name)
        assert final.finish == "cancel"
        assert final.usage is not None
        assert final.usage.output_tokens == count
    await gateway.cancel("running")
    assert isinstance(await gateway.send(gateway.request("next", [3], sampling(2))), Accepted)
    await gateway.final("next")
    assert "unknown" not in engine.core.cancelled


async def test_resume_answers_from_any_offset_and_none_for_what_is_not_known(rig: Rig, gateway: Gateway) -> None:
    engine = await rig.engine(replay_ttl=0.2, hold_at=5)
    await gateway.send(gateway.request("r", [9], sampling(8)))
    await eventually(lambda: len(gateway.tokens("r")) == 5)
    assert await gateway.resume("r", 2) == TokenDelta("r", 2, tuple(expected([9], 5, 2)))
    assert await gateway.resume("r", 5) == TokenDelta("r", 5, ())
    engine.core.hold_at = 10**9
    final = await gateway.final("r")
    assert await gateway.resume("r", 0) == TokenDelta("r", 0, tuple(expected([9], 8)), "length", final.usage)
    assert await gateway.resume("nobody", 0) is None
    await eventually(lambda: "r" not in engine.server._replay, what="the TTL has passed")
    assert await gateway.resume("r", 0) is None


async def test_a_resumed_request_goes_on_behind_what_was_generated(rig: Rig, gateway: Gateway) -> None:
    engine = await rig.engine()
    before = tuple(expected([4], 6))
    await gateway.send(gateway.request("r", [4], sampling(10), before))
    await gateway.final("r")
    assert [t for d in gateway.deltas for t in d.tokens] == expected([4], 10, 6)
    assert gateway.deltas[0].offset == 6
    assert engine.core.submitted[0].resumed == 6
    replayed = await gateway.resume("r", 0)
    assert replayed is not None
    assert list(replayed.tokens) == expected([4], 10)


async def test_one_message_a_step_carries_all_requests_of_a_gateway(rig: Rig, gateway: Gateway) -> None:
    engine = await rig.engine(hold_at=0)
    for i in range(30):
        await gateway.send(gateway.request(f"r{i}", [i + 1], sampling(10)))
    await eventually(lambda: len(engine.core.submitted) == 30)
    engine.core.hold_at = 10**9
    for i in range(30):
        await gateway.final(f"r{i}")
        assert gateway.tokens(f"r{i}") == expected([i + 1], 10)
    assert len(gateway.batches) <= 12


async def test_the_requests_of_a_silent_gateway_are_cancelled(
    rig: Rig, gateway: Gateway, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_watch, "GATEWAY_LOST_SECONDS", 0.4)
    engine = await rig.engine(hold_at=2)
    other = await Gateway("other").connect(nats.url)
    await gateway.send(gateway.request("lost", [1]))
    await other.send(other.request("kept", [2]))

    async def beat() -> None:
        while True:
            await other.nats.publish(subjects.GATEWAY_HEARTBEATS, codec.encode(GatewayHeartbeat("other")))
            await asyncio.sleep(0.05)

    beating = asyncio.create_task(beat())
    assert (await gateway.final("lost")).finish == "cancel"
    assert engine.core.cancelled == ["lost"]
    assert "kept" not in other.finals
    beating.cancel()
    await other.nats.close()


async def test_a_tokenizer_of_several_mib_comes_in_chunks_below_the_smallest_message_limit(
    rig: Rig, gateway: Gateway
) -> None:
    text = "".join(chr(0x4E00 + (i * i * 7919 + i) % 20000) for i in range(1_200_000))
    await rig.engine(bundle=TokenizerBundle(tokenizer_json=text, chat_template="{{ x }}", special=SpecialTokens()))
    count, parts = 1, []
    while len(parts) < count:
        reply = await gateway.nats.request(subjects.tokenizer("engine-0"), str(len(parts)).encode(), timeout=5)
        assert len(reply.data) < 2**20
        chunk = codec.tokenizer_chunk.decode(reply.data)
        count = chunk.count
        parts.append(chunk.data)
    assert count >= 3
    for wrong in (b"-1", b"99", b"x", b""):
        await gateway.nats.publish(subjects.tokenizer("engine-0"), wrong, reply="nobody")
    assert isinstance(await gateway.send(gateway.request("alive", [1])), Accepted)


async def test_block_events_are_numbered_and_a_snapshot_names_its_event(rig: Rig, gateway: Gateway) -> None:
    engine = await rig.engine()
    events = []

    async def on_events(msg: Msg) -> None:
        events.append(codec.block_events.decode(msg.data))

    await gateway.nats.subscribe(subjects.BLOCK_EVENTS, cb=on_events)
    await gateway.nats.flush()
    engine.core.change_blocks({b"a" * 32, b"b" * 32})
    engine.core.change_blocks({b"c" * 32}, {b"a" * 32})
    await eventually(lambda: len(events) == 2)
    assert [e.event_id for e in events] == [1, 2]
    assert events[1].removed == (b"a" * 32,)
    reply = await gateway.nats.request(subjects.blocks("engine-0"), b"", timeout=5)
    snapshot = codec.block_snapshot.decode(reply.data)
    assert (snapshot.event_id, set(snapshot.blocks)) == (2, {b"b" * 32, b"c" * 32})
    assert snapshot.incarnation == engine.server.incarnation == events[0].incarnation
    await eventually(lambda: gateway.beats[-1].last_event_id == 2)


async def test_notes_about_sessions_reach_the_core(rig: Rig, gateway: Gateway) -> None:
    engine = await rig.engine()
    await gateway.nats.publish(subjects.SESSION_NOTES, b"no note")
    note = SessionNote(session_id="s", standing="waiting")
    await gateway.nats.publish(subjects.SESSION_NOTES, codec.encode(note))
    await gateway.nats.flush()
    await eventually(lambda: engine.core.notes == [NoteSession("s", "waiting")])


async def test_the_tree_of_what_is_cached_is_told_to_who_asks(rig: Rig, gateway: Gateway) -> None:
    engine = await rig.engine()
    run = CachedRun(name=b"a" * 32, start=0, tokens=192, device=128, held=64, host=64, session_id="s")
    engine.core.sight = Sight((run,), 100, 200)
    replies = [await gateway.nats.request(subjects.cache("engine-0"), b"", timeout=5) for _ in range(2)]
    for reply in replies:
        tree = codec.cache_tree.decode(reply.data)
        assert (tree.engine_id, tree.runs, tree.page_bytes, tree.state_bytes) == ("engine-0", (run,), 100, 200)
        assert (tree.pages_total, tree.pages_held, tree.pages_cached, tree.left_out) == (100, 50, 1, 0)


def test_of_a_large_tree_what_was_used_last_is_told_with_all_before_it() -> None:
    def run(name: str, parent: str, idle: float) -> CachedRun:
        return CachedRun(name=name.encode(), parent=parent.encode(), start=0, tokens=64, device=64, idle_seconds=idle)

    runs = (run("a", "", 50), run("ab", "a", 40), run("abc", "ab", 1), run("x", "", 2), run("xy", "x", 3))
    names = [[each.name.decode() for each in newest(runs, room)] for room in (5, 4, 3, 2, 0)]
    assert names == [["a", "ab", "abc", "x", "xy"], ["a", "ab", "abc", "x"], ["a", "ab", "abc"], ["x", "xy"], []]


async def test_drain_lets_open_requests_finish_and_takes_no_new_ones(rig: Rig, gateway: Gateway) -> None:
    engine = await rig.engine(hold_at=3)
    await gateway.send(gateway.request("open", [1]))
    await eventually(lambda: len(gateway.tokens("open")) == 3)
    draining = asyncio.create_task(engine.drain(20))
    await eventually(lambda: gateway.beats[-1].state == "draining")
    refused = await gateway.send(gateway.request("late", [2]))
    assert isinstance(refused, Rejected)
    assert refused.reason == "draining"
    assert isinstance(await gateway.send(gateway.request("open", [1])), Accepted), "it runs here"
    engine.core.hold_at = 10**9
    await asyncio.wait_for(draining, 10)
    assert (await gateway.final("open")).finish == "length"
    assert gateway.tokens("open") == expected([1], 20)


async def test_drain_cancels_what_does_not_finish_in_time(rig: Rig, gateway: Gateway) -> None:
    engine = await rig.engine(hold_at=3)
    await gateway.send(gateway.request("stuck", [1]))
    await asyncio.wait_for(engine.drain(0.2), 5)
    final = await gateway.final("stuck")
    assert final.finish == "cancel"
    assert gateway.tokens("stuck") == expected([1], 3)


@pytest.mark.parametrize("how", ["fatal result", "exception of the loop"])
async def test_a_broken_core_announces_failed_and_leaves_its_requests_to_others(
    rig: Rig, gateway: Gateway, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    engine = await rig.engine(hold_at=3)
    await gateway.send(gateway.request("r", [1]))
    await eventually(lambda: len(gateway.tokens("r")) == 3)
    if how == "fatal result":
        engine.core.fail("device lost")
    else:
        engine.core.crash(RuntimeError("device lost"))
    await asyncio.wait_for(engine.server.failed.wait(), 5)
    await eventually(lambda: gateway.beats[-1].state == "failed")
    assert "device lost" in gateway.beats[-1].detail
    refused = await gateway.send(gateway.request("late", [2]))
    assert isinstance(refused, Rejected)
    await asyncio.wait_for(engine.drain(20), 5)  # does not wait for what cannot come
    assert "r" not in gateway.finals, "an error delta would end at the client what another engine can go on with"


async def test_a_core_that_skips_tokens_is_a_failure_and_no_silent_hole(rig: Rig, gateway: Gateway) -> None:
    engine = await rig.engine(hold_at=3)
    await gateway.send(gateway.request("r", [1]))
    await eventually(lambda: len(gateway.tokens("r")) == 3)
    engine.core.submitted[0].output.extend([0, 0])
    engine.core.hold_at = 10**9
    await asyncio.wait_for(engine.server.failed.wait(), 5)
    assert gateway.tokens("r") == expected([1], 3)


async def test_nats_down_at_start_and_away_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEARTBEAT_SECONDS", 0.05)
    server = NatsServer()
    rig = Rig(server.url)
    gateway = Gateway()
    try:
        engine = await rig.engine(hold_at=3, connected=False)
        server.start()
        await gateway.connect(server.url)
        await eventually(lambda: gateway.beats and gateway.beats[-1].state == "ready")
        await gateway.send(gateway.request("r", [1], sampling(40)))
        await eventually(lambda: len(gateway.tokens("r")) == 3)
        server.stop()
        engine.core.hold_at = 10**9
        await eventually(lambda: engine.server._replay.open_count == 0)
        beats = len(gateway.beats)
        server.start()
        await eventually(lambda: len(gateway.beats) > beats and gateway.nats.is_connected, 15)
        replayed = await gateway.resume("r", 3)
        assert replayed is not None
        assert list(replayed.tokens) == expected([1], 40, 3)
        assert replayed.finish == "length"
        assert isinstance(await gateway.send(gateway.request("again", [5])), Accepted)
        await gateway.final("again")
        assert gateway.tokens("again") == expected([5], 20)
    finally:
        await gateway.nats.close()
        await rig.close()
        server.close()


async def test_one_request_makes_one_tree_of_spans(rig: Rig, gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(request_trace, "_tracer", provider.get_tracer("test"))
    engine = await rig.engine()
    parent = provider.get_tracer("gateway").start_span("chat")
    await gateway.nats.request(
        subjects.generate("engine-0"),
        codec.encode(gateway.request("traced", [1, 2])),
        timeout=5,
        headers=telemetry.headers(parent),
    )
    await gateway.final("traced")
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"engine.generate", "engine.queue", "engine.prefill", "engine.decode"}
    root = spans.pop("engine.generate")
    assert root.parent is not None
    assert root.parent.span_id == parent.get_span_context().span_id
    for span in spans.values():
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id
    assert root.attributes is not None
    assert root.attributes["gen_ai.usage.output_tokens"] == 20
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert telemetry.parent_of({"traceparent": engine.core.submitted[0].trace}).split("-")[2] == trace.format_span_id(
        root.context.span_id
    )


async def test_metrics_of_a_request(rig: Rig, gateway: Gateway) -> None:
    engine = await rig.engine()
    await gateway.send(gateway.request("r", [1, 2]))
    await gateway.final("r")
    await gateway.send(gateway.request("again", [1, 2], sampling(4), (1, 2)))
    await gateway.final("again")
    text = generate_latest(engine.metrics.registry).decode()
    for line in (
        'samovar_engine_requests_total{finish="length"} 2.0',
        "samovar_engine_output_tokens_total 22.0",
        "samovar_engine_pages_total 100.0",
        "samovar_engine_time_to_first_token_seconds_count 2.0",
        "samovar_engine_requests_running 0.0",
    ):
        assert line in text
