"""The parts of the engine client that need no bus: token stream, engine registry, block index."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.block_index import BlockIndex
from services.gateway.engines import Engines
from services.gateway.token_stream import TokenStream
from services.protocol.events import ENGINE_LOST_SECONDS, BlockEvents, BlockSnapshot, Heartbeat, ModelCard
from services.protocol.generate import GenerateRequest, SamplingParams, TokenDelta, Usage, pack_ids


def card(fingerprint: str = "f", max_model_len: int = 100) -> ModelCard:
    return ModelCard(
        name="m",
        fingerprint=fingerprint,
        max_model_len=max_model_len,
        block_tokens=64,
        vocab_size=10,
        tokenizer_digest="d",
        created=1,
    )


def stream(cancelled: list[str] | None = None) -> TokenStream:
    request = GenerateRequest(
        request_id="r", gateway_id="gw", prompt=pack_ids([1, 2, 3]), sampling=SamplingParams(max_tokens=99)
    )
    made = TokenStream(request, None, lambda s: (cancelled if cancelled is not None else []).append(s.wire_id))
    made.assign("e", "i", card())
    return made


USAGE = Usage(prompt_tokens=3, output_tokens=9, cached_device=2)


@given(data=st.data(), pieces=st.lists(st.integers(0, 5), min_size=1, max_size=10))
def test_deltas_in_any_order_and_number_give_the_tokens_once(data: st.DataObject, pieces: list[int]) -> None:
    deltas, whole = [], []
    for i, count in enumerate(pieces):
        fresh = tuple(range(100 * i, 100 * i + count))
        deltas.append(TokenDelta("r", len(whole), fresh))
        whole += fresh
    deltas.append(TokenDelta("r", len(whole), (), "stop", USAGE))
    sent = data.draw(st.permutations(deltas)) + data.draw(st.lists(st.sampled_from(deltas), max_size=5))
    lost = data.draw(st.sets(st.integers(0, len(sent) - 1), max_size=len(sent) - 1))
    reader = stream()
    for i, delta in enumerate(sent):
        if i not in lost:
            reader.accept(delta, 1.0)
            assert reader.output == whole[: len(reader.output)]
    if not reader.done:  # what Resume brings
        at = len(reader.output)
        reader.accept(TokenDelta("r", at, tuple(whole[at:]), "stop", USAGE), 2.0)
    assert reader.output == whole
    assert reader.done
    assert not reader.needs_help


async def test_a_reader_waits_is_woken_once_and_may_be_cancelled_in_between() -> None:
    reader = stream()
    waiting = asyncio.create_task(reader.next())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    waiting = asyncio.create_task(reader.next())
    await asyncio.sleep(0)
    reader.accept(TokenDelta("r", 0, (1,)), 1.0)
    reader.accept(TokenDelta("r", 1, (2,)), 1.0)
    assert (await waiting).tokens == [1, 2]
    reader.accept(TokenDelta("r", 2, (), "stop", USAGE), 1.0)
    last = await reader.next()
    assert (last.tokens, last.finish) == ([], "stop")


def test_a_cancel_that_nobody_asked_for_is_an_interruption_and_no_end() -> None:
    reader = stream()
    reader.accept(TokenDelta("r", 0, (1, 2)), 1.0)
    reader.accept(TokenDelta("r", 2, (), "cancel", USAGE), 1.0)
    assert not reader.done
    assert reader.interrupted
    reader.assign("e2", "i2", card())
    assert reader.wire_id == "r.2"
    assert not reader.needs_help
    reader.cancel()
    reader.accept(TokenDelta("r.2", 2, (), "cancel", USAGE), 1.0)
    assert reader.done


def test_usage_is_that_of_the_whole_request() -> None:
    reader = stream()
    reader.accept(TokenDelta("r", 0, tuple(range(8))), 1.0)
    # A successor that counted our output among what it found in its cache.
    reader.accept(
        TokenDelta("r", 8, (), "stop", Usage(prompt_tokens=3, output_tokens=8, cached_device=2, cached_host=9)), 1.0
    )
    usage = reader._last.usage  # type: ignore[union-attr]
    assert usage is not None
    assert (usage.prompt_tokens, usage.output_tokens, usage.cached_device, usage.cached_host) == (3, 8, 2, 1)


def test_cancel_is_sent_once_and_not_after_the_end() -> None:
    sent: list[str] = []
    reader = stream(sent)
    reader.cancel()
    reader.cancel()
    assert sent == ["r"]
    ended = stream(sent)
    ended.end("error", "gone")
    ended.cancel()
    assert sent == ["r"]


def beat(engine_id: str = "e", incarnation: str = "1", state: str = "ready", **rest: object) -> Heartbeat:
    return Heartbeat(engine_id=engine_id, incarnation=incarnation, state=state, **rest)  # type: ignore[arg-type]


def test_engines_are_lost_by_silence_restart_and_failure() -> None:
    engines = Engines()
    assert not engines.heard(beat(card=card()), 0.0)
    assert engines.alive("e", "1")
    assert engines.expire(ENGINE_LOST_SECONDS) == []
    engines.forgive(10.0)
    assert engines.expire(10.0 + ENGINE_LOST_SECONDS) == []
    assert engines.heard(beat(incarnation="2", state="loading"), 11.0), "a new process"
    assert not engines.alive("e", "1")
    assert engines.models() == []
    assert not engines.heard(beat(incarnation="2", card=card()), 12.0)
    assert engines.heard(beat(incarnation="2", card=card(), state="failed"), 13.0)
    assert not engines.heard(beat(incarnation="2", card=card(), state="failed"), 13.5), "said once"
    assert not engines.alive("e", "2")
    assert engines.expire(20.0) == ["e"]
    assert engines.missing() == "no engine has been heard"
    assert engines.known("m")


def test_draining_engines_keep_their_streams_and_get_no_new_ones() -> None:
    engines = Engines()
    engines.heard(beat(card=card()), 0.0)
    engines.heard(beat(card=card(), state="draining"), 0.1)
    assert engines.alive("e", "1")
    assert engines.serving("m") == engines.like(card()) == []
    assert engines.missing() == "engine e is draining"


def test_the_card_of_a_name_is_what_all_engines_can_hold() -> None:
    engines = Engines()
    engines.heard(beat("a", card=card(max_model_len=100)), 0.0)
    engines.heard(beat("b", card=card(max_model_len=50)), 0.0)
    engines.heard(beat("c", card=card("other", max_model_len=10)), 0.0)
    assert [(c.fingerprint, c.max_model_len) for c in engines.models()] == [("f", 50)]


async def test_wait_change_wakes_on_a_change_and_gives_up_in_time() -> None:
    engines = Engines()
    waiting = asyncio.create_task(engines.wait_change(30))
    await asyncio.sleep(0)
    engines.heard(beat(card=card()), 0.0)
    await asyncio.wait_for(waiting, 1)
    await asyncio.wait_for(engines.wait_change(0.01), 1)


def events(event_id: int, stored: tuple[bytes, ...] = (), removed: tuple[bytes, ...] = ()) -> BlockEvents:
    return BlockEvents(engine_id="e", incarnation="1", event_id=event_id, stored=stored, removed=removed)


names = st.integers(0, 5).map(lambda n: bytes([n]))


@given(data=st.data(), changes=st.lists(st.tuples(st.sets(names), st.sets(names)), min_size=1, max_size=8))
def test_the_block_index_comes_right_after_any_loss(
    data: st.DataObject, changes: list[tuple[set[bytes], set[bytes]]]
) -> None:
    truth: list[set[bytes]] = [set()]
    sent: list[BlockEvents] = []
    for i, (stored, removed) in enumerate(changes, 1):
        truth.append((truth[-1] - removed) | stored)
        sent.append(events(i, tuple(stored), tuple(removed)))
    index = BlockIndex()
    snapshot_at = data.draw(st.integers(0, len(changes)))
    arrival = data.draw(st.permutations(sent))
    lost = data.draw(st.sets(st.sampled_from(range(len(sent)))))
    taken = data.draw(st.integers(0, len(arrival)))
    for i, event in enumerate(arrival):
        if i == taken and index.wants_snapshot:
            index.restore(
                BlockSnapshot(engine_id="e", incarnation="1", event_id=snapshot_at, blocks=tuple(truth[snapshot_at]))
            )
        if i not in lost:
            index.apply(event)
        assert index._blocks == truth[index.event_id]
    for _ in range(2):
        index.announced(len(changes))
    assert index.wants_snapshot == (index.event_id < len(changes))
    index.restore(
        BlockSnapshot(engine_id="e", incarnation="1", event_id=len(changes), blocks=tuple(truth[len(changes)]))
    )
    assert index._blocks == truth[len(changes)]
    assert not index.wants_snapshot


def test_overlap_is_the_leading_run() -> None:
    index = BlockIndex()
    index.apply(events(1, (b"a", b"b", b"d")))
    assert index.overlap([b"a", b"b", b"c", b"d"]) == 2
    assert index.overlap([b"x", b"a"]) == 0
    assert index.overlap([]) == 0
    assert index.overlap([b"b", b"a"]) == 2
