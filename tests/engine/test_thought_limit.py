"""Thoughts end at their limit: by tokens that the engine puts in, behind which the model goes on as behind its own."""

import pytest
import torch

from services.engine.admission import Refused, admit
from services.engine.cache.owners import Owner
from services.engine.mailbox import Submit
from services.engine.request import Request
from services.engine.sequence import Sequence
from services.protocol.generate import GenerateRequest, SamplingParams, ThoughtLimit, pack_ids
from tests.engine.test_tiny_resume import Engine
from tests.engine.tiny_prompts import prompts, tokenizer
from tests.gateway.fake_engines import card

CLOSE = 90
LIMIT = ThoughtLimit(tokens=4, close=CLOSE, closing=(80, CLOSE, 81))


def sequence(output: tuple[int, ...] = (), max_tokens: int = 100, limit: ThoughtLimit | None = LIMIT) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(99,), thoughts=limit)
    request = Request("r", "gateway", [1, 2, 3], list(output), len(output), sampling)
    return Sequence.of(request, 0, "fingerprint", 1000, Owner("s"))


def told(of: Sequence, *steps: tuple[int, ...]) -> list[int]:
    """All that a client gets, of an answer that goes on."""
    tokens: list[int] = []
    for step in steps:
        given, finish = of.extend(step)
        assert finish is None
        tokens += given
    assert of.request.output[of.request.resumed :] == tokens
    assert of.tokens == [1, 2, 3, *of.request.output]
    return tokens


def test_thoughts_are_closed_at_the_limit_and_only_there() -> None:
    assert told(sequence(), (5,), (6,), (7,), (8,), (9,)) == [5, 6, 7, 8, 80, CLOSE, 81, 9]
    assert told(sequence(limit=None), (5, 6, 7), (8, 9)) == [5, 6, 7, 8, 9]


def test_what_a_step_brings_beyond_the_limit_is_dropped() -> None:
    assert told(sequence(), (5, 6, 7), (8, 9, 10), (11,)) == [5, 6, 7, 8, 80, CLOSE, 81, 11]


@pytest.mark.parametrize("steps", [((5, CLOSE, 6, 7, 8),), ((5, 6, 7), (CLOSE,), (8, 9, 10, 11))])
def test_thoughts_that_the_model_has_closed_are_left_alone(steps: tuple[tuple[int, ...], ...]) -> None:
    assert told(sequence(), *steps) == [token for step in steps for token in step]


def test_an_answer_may_end_within_its_thoughts_or_their_closing() -> None:
    assert sequence().extend((5, 99, 6)) == ((5, 99), "stop")
    assert sequence(max_tokens=3).extend((5, 6, 7, 8)) == ((5, 6, 7), "length")
    assert sequence(max_tokens=6).extend((5, 6, 7, 8)) == ((5, 6, 7, 8, 80, CLOSE), "length")


def test_a_resumed_answer_ends_its_thoughts_at_the_same_place() -> None:
    assert told(sequence((5, 6)), (7,), (8,), (9,)) == [7, 8, 80, CLOSE, 81, 9]
    assert told(sequence((5, 6, 7, 8, 80, CLOSE, 81)), (9,), (10,)) == [9, 10]
    # A predecessor's last message was lost in its middle: they are closed with the next token.
    assert told(sequence((5, 6, 7, 8, 80)), (9,)) == [9, 80, CLOSE, 81]


@pytest.mark.parametrize(
    "limit",
    [
        ThoughtLimit(tokens=0, close=CLOSE, closing=(CLOSE,)),
        ThoughtLimit(tokens=4, close=CLOSE, closing=(80,)),
        ThoughtLimit(tokens=4, close=CLOSE, closing=(CLOSE, 258)),
    ],
)
def test_a_limit_that_cannot_work_is_refused(limit: ThoughtLimit) -> None:
    sampling = SamplingParams(max_tokens=9, thoughts=limit)
    wire = GenerateRequest(request_id="r", gateway_id="g", prompt=pack_ids([1]), sampling=sampling)
    with pytest.raises(Refused, match="thoughts"):
        admit(wire, [1], [], card())


def test_the_model_goes_on_behind_the_closing_as_behind_its_own_words() -> None:
    closing = tuple(tokenizer().encode("\n</think>\n\n", add_special_tokens=False).ids)
    close = tokenizer().token_to_id("</think>")
    prompt = tokenizer().encode(prompts("thinking", 1)[0], add_special_tokens=False).ids
    engine = Engine(4096, torch.device("cpu"))
    free = engine.serve("free", prompt, most=8)
    assert close not in free
    sampling = SamplingParams(
        max_tokens=24, temperature=0, thoughts=ThoughtLimit(tokens=5, close=close, closing=closing)
    )
    engine.told["limited"] = []
    engine.inbox.put(Submit(Request("limited", "gateway", list(prompt), [], 0, sampling)))
    engine.run()
    limited = engine.told["limited"]
    assert limited[: 5 + len(closing)] == [*free[:5], *closing]
    rest = limited[5 + len(closing) :]
    assert rest == engine.serve("written", [*prompt, *free[:5], *closing], most=len(rest))
    assert engine.usages["limited"].output_tokens == len(limited)
