"""The parts of the engine server that need no bus: replay buffer, token messages, admission, gateway watch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine import replay as replay_module
from services.engine.admission import RETRY_SECONDS_MAX, RETRY_SECONDS_UNKNOWN, Admission, Refused
from services.engine.gateway_watch import GatewayWatch
from services.engine.outbox import token_messages
from services.engine.replay import ReplayBuffer
from services.engine.tokenizer_chunks import TokenizerChunks
from services.protocol import codec
from services.protocol.events import GATEWAY_LOST_SECONDS
from services.protocol.generate import TokenDelta, Usage
from tests.bus_rig import BUNDLE

USAGE = Usage(prompt_tokens=1, output_tokens=2)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=30).map(tuple)


@given(pieces=st.lists(tokens, max_size=8), generated=tokens, offset=st.integers(0, 100), repeat=st.booleans())
def test_replay_gives_back_every_suffix(
    pieces: list[tuple[int, ...]], generated: tuple[int, ...], offset: int, repeat: bool
) -> None:
    replay = ReplayBuffer(ttl=10)
    replay.begin("r", "gw", generated)
    whole = list(generated)
    for piece in pieces:
        delta = TokenDelta("r", len(whole), piece)
        whole += piece
        for _ in range(1 + repeat):
            replay.add(delta, 0.0)
    read = replay.read("r", offset)
    assert read is not None
    assert (read.offset, list(read.tokens), read.finish) == (offset, whole[offset:], None)
    assert replay.is_open("r")

    replay.add(TokenDelta("r", len(whole), (), "stop", USAGE), 5.0)
    replay.add(TokenDelta("r", len(whole), (1,), "length", USAGE), 6.0)  # nothing comes after the end
    read = replay.read("r", offset)
    assert read is not None
    assert (list(read.tokens), read.finish, read.usage) == (whole[offset:], "stop", USAGE)
    assert replay.open == []
    assert "r" in replay
    replay.expire(14.9)
    assert "r" in replay
    replay.expire(15.0)
    assert "r" not in replay
    assert replay.read("r", 0) is None


def test_replay_refuses_a_hole() -> None:
    replay = ReplayBuffer(ttl=10)
    replay.begin("r", "gw", ())
    with pytest.raises(ValueError, match="skipped"):
        replay.add(TokenDelta("r", 3, (1,)), 0.0)


def test_a_long_replay_comes_in_parts_with_the_finish_in_the_last() -> None:
    replay = ReplayBuffer(ttl=10)
    whole = tuple(range(replay_module.DELTA_TOKENS + 5))
    replay.begin("r", "gw", ())
    replay.add(TokenDelta("r", 0, whole, "stop", USAGE, cached=7), 0.0)
    first = replay.read("r", 0)
    assert first is not None
    assert (len(first.tokens), first.finish, first.cached) == (replay_module.DELTA_TOKENS, None, 7)
    assert len(codec.encode(first)) < 2**20
    rest = replay.read("r", len(first.tokens))
    assert rest is not None
    assert (first.tokens + rest.tokens, rest.finish) == (whole, "stop")


def test_finished_requests_are_bounded_in_number_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "FINISHED_MAX", 4)
    monkeypatch.setattr(replay_module, "FINISHED_TOKENS_MAX", 25)
    replay = ReplayBuffer(ttl=1e9)
    for i in range(8):
        replay.begin(f"r{i}", "gw", ())
        replay.add(TokenDelta(f"r{i}", 0, tuple(range(10 if i == 7 else 5)), "stop", USAGE), float(i))
    assert [f"r{i}" in replay for i in range(8)] == [False] * 4 + [True] * 4
    replay.begin("big", "gw", tuple(range(100)))
    replay.add(TokenDelta("big", 100, (), "stop", USAGE), 9.0)
    assert [f"r{i}" in replay for i in range(8)] == [False] * 8


def test_open_requests_of_a_gateway() -> None:
    replay = ReplayBuffer(ttl=10)
    for name, gateway in (("a", "x"), ("b", "y"), ("c", "x")):
        replay.begin(name, gateway, ())
    replay.add(TokenDelta("a", 0, (), "stop", USAGE), 0.0)
    assert replay.open_of("x") == ["c"]
    assert replay.open_count == 2


@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=20),
    limit=st.integers(400, 3000),
    finished=st.booleans(),
)
def test_token_messages_fit_and_lose_nothing(lengths: list[int], limit: int, finished: bool) -> None:
    deltas = [
        TokenDelta(f"request-{i}", 7, tuple(range(70_000, 70_000 + n)), *(("stop", USAGE, "") if finished else ()))
        for i, n in enumerate(lengths)
    ]
    messages = token_messages("engine-0", deltas, limit)
    assert all(len(message) <= limit for message in messages)
    seen: dict[str, list[int]] = {d.request_id: [] for d in deltas}
    ended: list[str] = []
    for message in messages:
        for delta in codec.token_batch.decode(message).deltas:
            assert delta.offset == 7 + len(seen[delta.request_id])
            assert delta.request_id not in ended
            seen[delta.request_id] += delta.tokens
            if delta.finish is not None:
                ended.append(delta.request_id)
    assert [tuple(seen[d.request_id]) for d in deltas] == [d.tokens for d in deltas]
    assert len(ended) == (len(deltas) if finished else 0)


def test_what_fits_is_one_message() -> None:
    deltas = [TokenDelta(f"r{i}", 0, (1,)) for i in range(64)]
    assert len(token_messages("e", deltas, 2**20)) == 1


def test_admission_counts_places_and_estimates_the_wait() -> None:
    admission = Admission(max_running=2, max_queue=3)
    admission.check(4)
    with pytest.raises(Refused) as caught:
        admission.check(5)
    assert caught.value.reason == "overloaded"
    assert admission.retry_after(0.0) == RETRY_SECONDS_UNKNOWN
    for second in range(10):
        admission.finished(float(4 * second))
    assert admission.retry_after(40.0) == 4.0  # one every four seconds
    assert admission.retry_after(10_000.0) == RETRY_SECONDS_MAX
    for _ in range(64):
        admission.finished(40.0)
    assert admission.retry_after(40.5) == 1.0


def test_gateways_are_lost_by_silence_that_is_their_own() -> None:
    watch = GatewayWatch()
    watch.heard("a", 0.0)
    watch.heard("b", 5.0)
    assert watch.expire(GATEWAY_LOST_SECONDS) == []
    assert watch.expire(GATEWAY_LOST_SECONDS + 0.1) == ["a"]
    assert watch.expire(GATEWAY_LOST_SECONDS + 0.1) == []
    watch.forgive(100.0)
    assert watch.expire(100.0 + GATEWAY_LOST_SECONDS) == []


def test_chunks_refuse_an_index_that_is_none() -> None:
    chunks = TokenizerChunks(BUNDLE)
    assert len(chunks) == 1
    for index in (-1, 1):
        with pytest.raises(IndexError):
            chunks.message(index)
