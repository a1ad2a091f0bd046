"""models/samovar-tiny from turn to turn: how an answer ended, or what the template makes of it, changes nothing of what
is said next.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from services.engine.batch import ModelOutput, Runner, Sampled, ScheduledBatch
from services.gateway.prompt.boundaries import Boundaries
from tests.devices import DEVICES
from tests.engine.test_tiny_resume import Engine, cold, context
from tests.engine.tiny_prompts import render, tokenizer

STOP = 4089
"""`<|im_end|>`"""
BLOCK, CUT = 6, 3
ANSWER = 24
LONG = "Count from 3 to 9. " * 30


@lru_cache
def boundaries() -> Boundaries:
    return Boundaries.of(tokenizer().token_to_id)


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens of their common prefix."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


class Verified:
    """A runner that gives a whole block of tokens where a context is so long: all drafts were right."""

    def __init__(self, runner: Runner, length: int, block: Sequence[int]) -> None:
        self._runner = runner
        self._length = length
        self._block = tuple(block)

    def run(self, batch: ScheduledBatch) -> ModelOutput:
        output = self._runner.run(batch)
        sampled = dict(output.sampled)
        for row in batch.rows:
            if row.sample is not None and row.start + len(row.tokens) == self._length:
                assert sampled[row.request_id].tokens == self._block[:1]
                sampled[row.request_id] = Sampled(self._block)
        return replace(output, sampled=sampled)

    def close(self) -> None:
        self._runner.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [50, 330])
def test_a_stop_token_amid_a_block(length: int, device: torch.device) -> None:
    prompt = context(1, length)
    answer = Engine(4096, device).serve("all", prompt, most=ANSWER)
    place = next(i for i in range(CUT - 1, ANSWER - BLOCK + CUT) if answer[i] not in answer[:i])
    first, stop = place - CUT + 1, answer[place]
    committed = length + first
    engine = Engine(4096, device)
    engine.core._runner = Verified(engine.core._runner, committed, answer[first : first + BLOCK])
    told = engine.serve("first", prompt, most=ANSWER, stop=(stop,))
    assert told == answer[: first + CUT]
    assert engine.usages["first"].output_tokens == first + CUT
    marks = [checkpoint.mark.position for checkpoint in engine.scheduler._checkpoints.all()]
    assert all(position <= committed + CUT for position in marks)
    for name, before in (("next", told), ("other", answer[: first + BLOCK])):
        turn = (*prompt, *before, *context(20, 40))
        assert tuple(engine.serve(name, turn)) == cold(turn, device)
        assert engine.usages[name].cached_tokens <= committed + CUT
    assert committed < 64 or engine.usages["next"].cached_tokens == committed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("asked", ["Hi", LONG])
def test_a_turn_whose_history_drops_the_empty_thoughts(asked: str, device: torch.device) -> None:
    """The template opens a turn without thinking by empty thoughts and leaves those out of the history: the second turn
    parts from the first before them, and goes on there, however short it is."""
    engine = Engine(4096, device)
    messages = [{"role": "user", "content": asked}]
    before: list[int] = []
    for turn in range(3):
        prompt = encode(render(messages))
        told = engine.serve(f"t{turn}", prompt, boundaries().hints(prompt), stop=(STOP,))
        assert tuple(told) == cold(tuple(prompt), device)[: len(told)]
        common = shared(before, prompt)
        assert engine.usages[f"t{turn}"].cached_tokens >= common
        assert (common > 0) is (turn > 0)
        said = tokenizer().decode(told, skip_special_tokens=True)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Bye"}]
        before = prompt
