"""The gateway's engine client and real engine servers over a real NATS server: every fault that a stream outlives."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from nats.aio.msg import Msg

from services.engine import gateway_watch
from services.engine import server as server_module
from services.gateway import dispatch, engine_client, engines, recovery, token_stream
from services.gateway.engine_client import EngineClient, EngineRejected, NoEngine, RequestTooLarge
from services.protocol import codec, hashing, subjects
from services.protocol.events import SpecialTokens, TokenizerBundle
from services.protocol.generate import TokenBatch
from tests.bus_rig import MODEL, LossyBus, Rig, expected, read_all, read_until, sampling, threads_left
from tests.nats import NatsServer, eventually, nats_server


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    with nats_server() as server:
        yield server


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are noticed in tenths of seconds."""
    monkeypatch.setattr(server_module, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(engines, "ENGINE_LOST_SECONDS", 0.6)
    monkeypatch.setattr(engine_client, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(engine_client, "CANCEL_SECONDS", 0.8)
    monkeypatch.setattr(token_stream, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(recovery, "RESUME_SECONDS", 0.5)
    monkeypatch.setattr(recovery, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(dispatch, "ACCEPT_SECONDS", 0.5)


@pytest.fixture
async def rig(nats: NatsServer, quick: None) -> AsyncIterator[Rig]:
    rig = Rig(nats.url)
    yield rig
    await rig.close()
    assert threads_left() == []


async def ready(client: EngineClient, count: int = 1) -> None:
    await eventually(lambda: len(client._engines.serving(MODEL)) == count, what=f"{count} engines ready")


def lossy(client: EngineClient) -> LossyBus:
    assert isinstance(client.bus, LossyBus)
    return client.bus


def is_tokens(msg: Msg, client: EngineClient) -> bool:
    return msg.subject == subjects.tokens(client.gateway_id)


# Without faults.


async def test_a_stream_from_accept_to_usage(rig: Rig) -> None:
    client = await rig.client()
    engine = await rig.engine()
    await ready(client)
    stream = await client.generate(MODEL, [1, 2, 3], sampling(), request_id="mine", hints=[1, 2])
    tokens, last = await read_all(stream)
    assert [request.hints for request in engine.core.submitted] == [(1, 2)]
    assert tokens == expected([1, 2, 3], 20)
    assert (stream.request_id, stream.engine_id, stream.prompt_tokens) == ("mine", "engine-0", 3)
    assert last.finish == "length"
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.output_tokens) == (3, 20)
    again = await stream.next()
    assert (again.tokens, again.finish, again.usage) == ([], "length", last.usage)
    assert client._streams == {}


async def test_what_arrives_while_nobody_reads_is_merged_into_one_chunk(rig: Rig) -> None:
    client = await rig.client()
    await rig.engine()
    await ready(client)
    stream = await client.generate(MODEL, [5], sampling(50))
    await eventually(lambda: stream.done)
    chunk = await stream.next()
    assert chunk.tokens == expected([5], 50)
    assert chunk.finish == "length"


async def test_many_streams_at_once_do_not_mix(rig: Rig) -> None:
    client = await rig.client()
    await rig.engine()
    await rig.engine("engine-1")
    await ready(client, 2)
    streams = await asyncio.gather(*(client.generate(MODEL, [i + 1], sampling(30)) for i in range(64)))
    results = await asyncio.gather(*(read_all(s) for s in streams))
    for i, (tokens, last) in enumerate(results):
        assert tokens == expected([i + 1], 30)
        assert last.finish == "length"
    assert {s.engine_id for s in streams} == {"engine-0", "engine-1"}


async def test_readiness_names_what_is_missing(rig: Rig) -> None:
    client = await rig.client()
    await asyncio.wait_for(client.bus.wait_connected(), 5)
    assert client.waiting_for() == "no engine has been heard"
    engine = await rig.engine(serve=False)
    engine.server.progress(0.43, "weights")
    await eventually(lambda: client.waiting_for() == "engine engine-0 is loading (43%): weights")
    assert client.models() == []
    assert not client.known(MODEL)
    with pytest.raises(NoEngine, match="43%"):
        await client.generate(MODEL, [1], sampling())
    rig.serve(engine)
    await eventually(lambda: client.waiting_for() == "")
    assert [card.name for card in client.models()] == [MODEL]
    await engine.kill()
    await eventually(lambda: client.models() == [])
    assert client.known(MODEL)
    with pytest.raises(NoEngine):
        await client.generate(MODEL, [1], sampling())


async def test_rejections_come_with_their_reason_and_leave_nothing_behind(rig: Rig) -> None:
    client = await rig.client()
    await rig.engine(max_model_len=8)
    await ready(client)
    with pytest.raises(EngineRejected, match="prompt is too long: 8 tokens > 8 maximum") as caught:
        await client.generate(MODEL, [1] * 8, sampling())
    assert caught.value.reason == "context_length"
    with pytest.raises(EngineRejected, match="temperature") as caught:
        await client.generate(MODEL, [1], sampling(temperature=-1))
    assert caught.value.reason == "bad_request"
    assert client._streams == {}


async def test_a_full_engine_is_passed_over_and_only_all_of_them_refuse(rig: Rig) -> None:
    client = await rig.client()
    for name in ("engine-0", "engine-1"):
        await rig.engine(name, max_running=2, max_queue=1, hold_at=0)
    await ready(client, 2)
    taken = [await client.generate(MODEL, [i + 1], sampling()) for i in range(6)]
    assert sorted(s.engine_id for s in taken) == ["engine-0"] * 3 + ["engine-1"] * 3
    with pytest.raises(EngineRejected) as caught:
        await client.generate(MODEL, [9], sampling())
    assert caught.value.reason == "overloaded"
    assert caught.value.retry_after >= 1
    for engine in rig.engines:
        engine.core.hold_at = 10**9
    for stream in taken:
        assert (await read_all(stream))[1].finish == "length"


async def test_100_at_once_on_a_queue_of_8(rig: Rig) -> None:
    client = await rig.client()
    engine = await rig.engine(max_running=4, max_queue=8, hold_at=1)
    await ready(client)
    results = await asyncio.gather(
        *(client.generate(MODEL, [i + 1], sampling(5)) for i in range(100)), return_exceptions=True
    )
    streams = [r for r in results if not isinstance(r, BaseException)]
    assert len(streams) == 12
    assert sum(isinstance(r, EngineRejected) and r.reason == "overloaded" for r in results) == 88
    engine.core.hold_at = 10**9
    for stream in streams:
        tokens, last = await read_all(stream)
        assert last.finish == "length"
        assert len(tokens) == 5


async def test_a_prompt_over_the_message_limit_is_refused_before_it_is_sent(quick: None) -> None:
    with nats_server(max_payload=64 * 1024) as server:
        rig = Rig(server.url)
        client = await rig.client()
        await rig.engine(max_model_len=10**6)
        await ready(client)
        with pytest.raises(RequestTooLarge, match="65536") as caught:
            await client.generate(MODEL, [1] * 20_000, sampling())
        assert caught.value.limit == 64 * 1024
        assert caught.value.size > 80_000
        assert client._streams == {}
        tokens, _ = await read_all(await client.generate(MODEL, [1] * 15_000, sampling()))
        assert len(tokens) == 20
        assert client.bus.counters.reconnects == 0
        await rig.close()


async def test_a_step_of_more_tokens_than_a_message_holds_arrives_whole(quick: None) -> None:
    with nats_server(max_payload=8 * 1024) as server:
        rig = Rig(server.url)
        client = await rig.client()
        engine = await rig.engine(max_model_len=10**6)
        engine.core.tokens_per_step = 10_000
        await ready(client)
        tokens, last = await read_all(await client.generate(MODEL, [3], sampling(25_000)))
        assert tokens == expected([3], 25_000)
        assert last.finish == "length"
        await rig.close()


# Tokenizer.


async def test_a_tokenizer_is_fetched_in_chunks_once_and_verified(rig: Rig) -> None:
    text = "".join(chr(0x4E00 + (i * i * 7919 + i) % 20000) for i in range(800_000))
    bundle = TokenizerBundle(tokenizer_json=text, chat_template="{{ messages }}", special=SpecialTokens(bos_id=1))
    client = await rig.client()
    engine = await rig.engine(bundle=bundle)
    await ready(client)
    card = client.models()[0]
    fetched = await asyncio.gather(*(client.tokenizer(card) for _ in range(4)))
    assert all(f is fetched[0] for f in fetched)
    assert fetched[0] == bundle
    await engine.kill()
    assert await client.tokenizer(card) == bundle  # kept


async def test_a_broken_tokenizer_is_not_taken(rig: Rig) -> None:
    client = await rig.client()
    engine = await rig.engine()
    await ready(client)
    chunk = codec.tokenizer_chunk.decode(engine.server._chunks.message(0))  # type: ignore[union-attr]
    broken = type(chunk)(chunk.digest, 0, 1, chunk.data[:-1] + b"x")
    engine.server._chunks._messages[0] = codec.encode(broken)  # type: ignore[union-attr]
    with pytest.raises(NoEngine, match="digest"):
        await client.tokenizer(client.models()[0])
    assert hashlib.blake2b(chunk.data, digest_size=16).hexdigest() == chunk.digest


# Cancel.


async def test_cancel_is_idempotent_and_ends_with_usage(rig: Rig) -> None:
    client = await rig.client()
    engine = await rig.engine(hold_at=4)
    await ready(client)
    stream = await client.generate(MODEL, [1], sampling())
    got = await read_until(stream, 4)
    for _ in range(3):
        stream.cancel()
    tokens, last = await read_all(stream)
    assert got + tokens == expected([1], 4)
    assert last.finish == "cancel"
    assert last.usage is not None
    assert last.usage.output_tokens == 4
    stream.cancel()
    assert engine.core.cancelled == [stream.wire_id]


async def test_a_lost_cancel_is_sent_again_by_the_tokens_that_nobody_reads(rig: Rig) -> None:
    client = await rig.client()
    engine = await rig.engine()
    await ready(client)
    lost = 0

    def no_cancel(msg: Msg) -> list[Msg]:
        nonlocal lost
        if msg.subject == subjects.cancel("engine-0") and lost < 1:
            lost += 1
            return []
        return [msg]

    engine.bus.filter = no_cancel
    stream = await client.generate(MODEL, [1], sampling(4000))
    await read_until(stream, 3)
    stream.cancel()
    _, last = await read_all(stream)
    assert last.finish == "cancel"
    await eventually(lambda: engine.core.cancelled == [stream.wire_id])
    assert lost == 1


async def test_cancel_of_a_stream_whose_engine_is_gone_ends_it_soon(rig: Rig) -> None:
    client = await rig.client()
    engine = await rig.engine(hold_at=3)
    await ready(client)
    stream = await client.generate(MODEL, [1], sampling())
    await read_until(stream, 3)
    await engine.kill()
    began = time.monotonic()
    stream.cancel()
    _, last = await read_all(stream)
    assert last.finish == "cancel"
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.output_tokens) == (1, 3)
    assert time.monotonic() - began < 3


async def test_a_caller_that_leaves_while_waiting_for_acceptance_leaves_no_request_behind(rig: Rig) -> None:
    client = await rig.client()
    engine = await rig.engine()
    await ready(client)
    held: list[Msg] = []

    def hold(msg: Msg) -> list[Msg]:
        if msg.subject == subjects.generate("engine-0"):
            held.append(msg)
            return []
        return [msg]

    engine.bus.filter = hold
    task = asyncio.create_task(client.generate(MODEL, [1], sampling(4000)))
    await eventually(lambda: held)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client._streams == {}
    engine.bus.filter = lambda msg: [msg]
    await engine.server._on_generate(held[0])  # it arrives after the Cancel: its tokens are strays
    await eventually(lambda: len(set(engine.core.cancelled)) == 1)


async def test_the_streams_of_a_gateway_that_died_are_cancelled(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_watch, "GATEWAY_LOST_SECONDS", 0.5)
    monkeypatch.setattr(engine_client, "GATEWAY_HEARTBEAT_SECONDS", 0.1)
    dying, living = await rig.client("dying"), await rig.client("living")
    engine = await rig.engine(hold_at=2)
    await ready(dying)
    await ready(living)
    lost = await dying.generate(MODEL, [1], sampling())
    kept = await living.generate(MODEL, [2], sampling())
    dying._watch_task.cancel()  # type: ignore[union-attr]
    lossy(dying).filter = lambda msg: []
    await eventually(lambda: engine.core.cancelled == [lost.wire_id])
    assert not kept.done


# Lost and repeated messages.


async def test_a_dropped_token_message_is_filled(rig: Rig) -> None:
    client = await rig.client()
    await rig.engine()
    await ready(client)
    seen = 0

    def drop(msg: Msg) -> list[Msg]:
        nonlocal seen
        if is_tokens(msg, client):
            seen += 1
            if seen in (1, 5, 6, 7, 13):
                return []
        return [msg]

    lossy(client).filter = drop
    tokens, last = await read_all(await client.generate(MODEL, [1, 2], sampling(40)))
    assert tokens == expected([1, 2], 40)
    assert last.finish == "length"
    assert client.counters.gaps >= 2
    assert client.counters.gaps_filled >= 2


async def test_repeated_and_reordered_messages_change_nothing(rig: Rig) -> None:
    client = await rig.client()
    await rig.engine()
    await ready(client)
    kept: list[Msg] = []

    def shuffle(msg: Msg) -> list[Msg]:
        if not is_tokens(msg, client):
            return [msg]
        kept.append(msg)
        if len(kept) % 3:
            return [kept[0]] if len(kept) > 3 else []
        return [kept[-1], kept[-2], kept[-3], kept[-1]]

    lossy(client).filter = shuffle
    tokens, last = await read_all(await client.generate(MODEL, [7], sampling(40)))
    assert tokens == expected([7], 40)
    assert last.finish == "length"
    assert client.counters.duplicates > 5


async def test_a_lost_last_message_is_noticed_by_the_silence(rig: Rig) -> None:
    client = await rig.client()
    await rig.engine()
    await ready(client)

    def drop_last(msg: Msg) -> list[Msg]:
        if is_tokens(msg, client) and any(d.finish for d in codec.token_batch.decode(msg.data).deltas):
            return []
        return [msg]

    lossy(client).filter = drop_last
    tokens, last = await read_all(await client.generate(MODEL, [8], sampling()))
    assert tokens == expected([8], 20)
    assert last.finish == "length"
    assert last.usage is not None
    assert last.usage.output_tokens == 20


async def test_nonsense_on_the_token_subject_harms_no_stream(rig: Rig) -> None:
    client = await rig.client()
    engine = await rig.engine(hold_at=2)
    await ready(client)
    stream = await client.generate(MODEL, [1], sampling())
    got = await read_until(stream, 2)
    await engine.bus.publish(subjects.tokens(client.gateway_id), b"\xc1nonsense")
    await engine.bus.publish(subjects.tokens(client.gateway_id), codec.encode(TokenBatch("engine-0", ())))
    engine.core.hold_at = 10**9
    tokens, _ = await read_all(stream)
    assert got + tokens == expected([1], 20)
    assert client.bus.counters.errors == 1


# Engines that go.


async def test_an_engine_killed_mid_stream_is_succeeded_by_another(rig: Rig) -> None:
    client = await rig.client()
    first = await rig.engine("engine-0", hold_at=7)
    await ready(client)
    prompt = [4, 5]
    streams = [await client.generate(MODEL, [*prompt, i], sampling(30), hints=[2]) for i in range(3)]
    got = [await read_until(s, 7) for s in streams]
    second = await rig.engine("engine-1")
    await ready(client, 2)
    await first.kill()
    for i, stream in enumerate(streams):
        tokens, last = await read_all(stream)
        assert got[i] + tokens == expected([*prompt, i], 30)
        assert last.finish == "length"
        assert stream.engine_id == "engine-1"
        assert last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.output_tokens) == (3, 30)
        assert last.usage.cached_tokens == 3  # the second engine also found our output in its cache
    assert client.counters.migrations == 3
    assert [r.resumed for r in second.core.submitted] == [7, 7, 7]
    assert {r.sampling.max_tokens for r in second.core.submitted} == {30}
    assert {r.hints for r in second.core.submitted} == {(2,)}


async def test_an_engine_that_restarts_goes_on_with_its_streams(rig: Rig) -> None:
    client = await rig.client()
    first = await rig.engine(hold_at=5)
    await ready(client)
    stream = await client.generate(MODEL, [6], sampling())
    waiting = await client.generate(MODEL, [7], sampling())
    got = await read_until(stream, 5)
    await first.kill()
    await rig.engine()  # the same id, a new incarnation
    tokens, last = await read_all(stream)
    assert got + tokens == expected([6], 20)
    assert last.finish == "length"
    assert stream.migrations == 1
    assert (await read_all(waiting))[0] == expected([7], 20)


async def test_a_failed_device_is_succeeded_at_once(rig: Rig) -> None:
    client = await rig.client()
    first = await rig.engine(hold_at=5)
    await ready(client)
    stream = await client.generate(MODEL, [6], sampling())
    got = await read_until(stream, 5)
    await rig.engine("engine-1")
    await ready(client, 2)
    first.core.fail("device lost")
    tokens, last = await read_all(stream)
    assert got + tokens == expected([6], 20)
    assert last.finish == "length"


async def test_an_engine_that_drains_hands_its_streams_over(rig: Rig) -> None:
    client = await rig.client()
    first = await rig.engine(hold_at=5)
    await ready(client)
    stream = await client.generate(MODEL, [6], sampling())
    got = await read_until(stream, 5)
    await rig.engine("engine-1")
    await ready(client, 2)
    await first.drain(0.1)
    tokens, last = await read_all(stream)
    assert got + tokens == expected([6], 20)
    assert (last.finish, last.error) == ("length", "")


@pytest.mark.parametrize(("output", "finish"), [("all of max_tokens", "length"), ("a stop token", "stop")])
async def test_a_complete_answer_whose_last_message_went_down_with_the_engine(
    rig: Rig, output: str, finish: str
) -> None:
    client = await rig.client()
    engine = await rig.engine()
    await ready(client)
    stops = (expected([3], 12)[11],) if finish == "stop" else ()

    def cut(msg: Msg) -> list[Msg]:
        if is_tokens(msg, client):
            batch = codec.token_batch.decode(msg.data)
            bare = tuple(type(d)(d.request_id, d.offset, d.tokens) for d in batch.deltas)
            msg.data = codec.encode(TokenBatch(batch.engine_id, bare))
        return [msg] if not msg.subject.startswith("_INBOX") else []

    lossy(client).filter = cut
    stream = await client.generate(MODEL, [3], sampling(20, stop_token_ids=stops))
    count = 20 if finish == "length" else 12
    got = await read_until(stream, count)
    await engine.kill()
    other = await rig.engine("engine-1")
    tokens, last = await read_all(stream)
    assert got + tokens == expected([3], count)
    assert last.finish == finish
    assert last.usage is not None
    assert last.usage.output_tokens == count
    assert other.core.submitted == []


async def test_no_engine_within_the_resume_timeout_is_an_error_with_what_was_there(rig: Rig) -> None:
    client = await rig.client(resume_timeout=0.5)
    engine = await rig.engine(hold_at=3)
    await ready(client)
    stream = await client.generate(MODEL, [6], sampling())
    got = await read_until(stream, 3)
    await engine.kill()
    tokens, last = await read_all(stream)
    assert got + tokens == expected([6], 3)
    assert last.finish == "error"
    assert "no engine went on" in last.error
    assert last.usage is not None
    assert last.usage.output_tokens == 3
    assert client.counters.migrations_failed == 1


async def test_only_engines_of_the_same_fingerprint_go_on(rig: Rig) -> None:
    client = await rig.client(resume_timeout=1.0)
    engine = await rig.engine(hold_at=3)
    await ready(client)
    stream = await client.generate(MODEL, [6], sampling())
    other = await rig.engine("engine-1", fingerprint="other weights")
    await ready(client, 2)
    await engine.kill()
    _, last = await read_all(stream)
    assert last.finish == "error"
    assert other.core.submitted == []


async def test_a_request_that_every_engine_dies_of_is_given_up(rig: Rig) -> None:
    client = await rig.client()
    engine = await rig.engine("engine-0", hold_at=0)
    await ready(client)
    stream = await client.generate(MODEL, [6], sampling())
    for i in range(1, recovery.FRUITLESS_MAX + 1):
        following = await rig.engine(f"engine-{i}", hold_at=0)
        await ready(client, 2)
        engine.core.fail("poisoned")
        if i < recovery.FRUITLESS_MAX:
            await eventually(lambda e=following: e.core.submitted, what=f"engine {i} has it")
        await engine.kill()
        engine = following
    _, last = await read_all(stream)
    assert last.finish == "error"
    assert "in a row" in last.error


async def test_an_engine_that_was_only_silent_keeps_its_streams(rig: Rig) -> None:
    client = await rig.client()
    engine = await rig.engine(hold_at=5)
    await ready(client)
    stream = await client.generate(MODEL, [6], sampling())
    got = await read_until(stream, 5)
    lossy(client).filter = lambda msg: [] if msg.subject == subjects.HEARTBEATS or is_tokens(msg, client) else [msg]
    await eventually(lambda: client.models() == [])
    engine.core.hold_at = 10**9
    lossy(client).filter = lambda msg: [msg]
    tokens, last = await read_all(stream)
    assert got + tokens == expected([6], 20)
    assert last.finish == "length"
    assert stream.migrations == 0
    assert len(engine.core.submitted) == 1


async def test_an_engine_that_forgot_the_request_gets_it_again(rig: Rig) -> None:
    client = await rig.client()
    engine = await rig.engine(hold_at=5)
    await ready(client)
    stream = await client.generate(MODEL, [6], sampling())
    got = await read_until(stream, 5)
    engine.server._replay._open.clear()
    await eventually(lambda: stream.migrations == 1)
    engine.core.hold_at = 10**9
    tokens, last = await read_all(stream)
    assert got + tokens == expected([6], 20)
    assert last.finish == "length"


# NATS that goes.


async def test_nats_down_at_start(quick: None) -> None:
    server = NatsServer()
    rig = Rig(server.url)
    client = await rig.client()
    engine = await rig.engine(connected=False)
    assert client.waiting_for() == f"no connection to NATS at 127.0.0.1:{server.port}"
    with pytest.raises(NoEngine, match="no connection to NATS"):
        await client.generate(MODEL, [1], sampling())
    server.start()
    await ready(client)
    assert (await read_all(await client.generate(MODEL, [1], sampling())))[0] == expected([1], 20)
    assert engine.server.state == "ready"
    await rig.close()
    server.close()


async def test_nats_away_in_mid_stream_and_back(quick: None) -> None:
    server = NatsServer().start()
    rig = Rig(server.url)
    client = await rig.client()
    engine = await rig.engine(hold_at=5)
    await ready(client)
    streams = [await client.generate(MODEL, [i + 1], sampling(40)) for i in range(5)]
    got = [await read_until(s, 5) for s in streams]
    server.stop()
    await eventually(lambda: not client.bus.connected)
    engine.core.hold_at = 30
    await eventually(lambda: all(len(r.output) == 30 for r in engine.core.submitted))  # published into nothing
    with pytest.raises(NoEngine, match="NATS"):
        await client.generate(MODEL, [1], sampling())
    server.start()
    await eventually(lambda: all(len(s.output) == 30 for s in streams), 20)
    engine.core.hold_at = 10**9
    for i, stream in enumerate(streams):
        tokens, last = await read_all(stream)
        assert got[i] + tokens == expected([i + 1], 40)
        assert last.finish == "length"
        assert stream.migrations == 0
    assert len(engine.core.submitted) == 5
    await rig.close()
    server.close()


async def test_nats_away_for_longer_than_the_resume_timeout_ends_the_stream(quick: None) -> None:
    server = NatsServer().start()
    rig = Rig(server.url)
    client = await rig.client(resume_timeout=0.3)
    await rig.engine(hold_at=2)
    await ready(client)
    stream = await client.generate(MODEL, [1], sampling())
    server.stop()
    _, last = await read_all(stream)
    assert last.finish == "error"
    assert "NATS was away" in last.error
    await rig.close()
    server.close()


# Routing.


async def test_a_prompt_goes_where_its_blocks_are(rig: Rig) -> None:
    client = await rig.client()
    await rig.engine("engine-0")
    warm = await rig.engine("engine-1")
    await ready(client, 2)
    prompt = [i % 100 for i in range(64 * 30)]
    names = set(hashing.chain(hashing.root("f", "salt"), prompt))
    warm.core.change_blocks(names)
    index = client._engines.get("engine-1").blocks  # type: ignore[union-attr]
    await eventually(lambda: len(index) == 30)
    for _ in range(3):
        stream = await client.generate(MODEL, prompt, sampling(), cache_salt="salt")
        assert stream.engine_id == "engine-1"
        await read_all(stream)
    cold = await client.generate(MODEL, prompt, sampling(), cache_salt="another")
    assert cold.engine_id == "engine-0"
    await read_all(cold)


async def test_a_missed_block_event_is_repaired_by_a_snapshot(rig: Rig) -> None:
    client = await rig.client()
    engine = await rig.engine()
    await ready(client)
    dropping = True
    lossy(client).filter = lambda msg: [] if dropping and msg.subject == subjects.BLOCK_EVENTS else [msg]
    engine.core.change_blocks({b"1" * 32, b"2" * 32})
    engine.core.change_blocks({b"3" * 32}, {b"1" * 32})
    await eventually(lambda: engine.server._feed.event_id == 2)
    index = client._engines.get("engine-0").blocks  # type: ignore[union-attr]
    await eventually(lambda: index.event_id == 2, what="heartbeats tell of events that never came")
    assert index._blocks == {b"2" * 32, b"3" * 32}
    dropping = False
    engine.core.change_blocks({b"4" * 32})
    await eventually(lambda: index._blocks == {b"2" * 32, b"3" * 32, b"4" * 32})
