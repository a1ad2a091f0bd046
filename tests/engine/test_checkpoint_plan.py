from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.checkpoint_plan import MOST_HINTS, checkpoint_positions


def positions(
    hints: tuple[int, ...], prompt: int, start: int = 0, end: int = 0, interval: int = 8192, gap: int = 64
) -> tuple[int, ...]:
    return checkpoint_positions(hints, prompt, max(end, prompt), start, interval, gap)


def test_the_prompts_end_and_the_last_hint_before_it_are_kept_however_close() -> None:
    assert positions((200, 995), 1000) == (200, 995, 1000)


def test_a_hint_at_the_prompts_end_is_one_checkpoint() -> None:
    assert positions((200, 1000), 1000) == (200, 1000)


def test_what_saves_too_little_is_not_kept() -> None:
    assert positions((), 63) == ()
    assert positions((200, 995), 1000, start=995) == ()
    assert positions((200, 995), 1000, start=937) == (995,)
    assert positions((200, 995), 1000, start=936) == (995, 1000)


def test_the_last_hint_is_kept_however_little_it_saves() -> None:
    assert positions((10,), 64) == (10, 64)
    assert positions((5, 10), 14) == (10,)
    assert positions((5, 10), 14, start=9) == (10,)
    assert positions((5, 10), 14, start=10) == ()
    assert positions((5, 10), 14, gap=1) == (5, 10, 14)


def test_hints_close_to_a_deeper_one_are_skipped() -> None:
    assert positions((100, 800, 850, 900, 990, 995), 1000) == (100, 800, 900, 995, 1000)


def test_of_many_hints_the_first_and_the_deepest_are_kept() -> None:
    hints = tuple(range(100, 10_000, 100))
    taken = positions(hints, 10_000, interval=1 << 30)
    assert taken == (100, 9500, 9600, 9700, 9800, 9900, 10_000)
    assert len(taken) == MOST_HINTS + 3


def test_a_long_prefill_has_a_ladder() -> None:
    assert positions((), 20_000) == (8192, 16_384, 20_000)
    assert positions((), 20_000, start=8192) == (16_384, 20_000)
    assert positions((), 16_400) == (8192, 16_400), "the rung beside the prompt's end saves nothing"


def test_behind_the_prompt_only_the_ladder_goes_on() -> None:
    assert positions((50,), 100, end=500, interval=128) == (50, 100, 256, 384)
    assert positions((50,), 100, start=120, end=500, interval=128) == (256, 384)


@pytest.mark.parametrize("hints", [(-5, 0), (1001, 5000)])
def test_hints_outside_the_prompt_are_no_concern(hints: tuple[int, ...]) -> None:
    assert positions(hints, 1000) == (1000,)


@given(
    hints=st.lists(st.integers(-10, 5000), max_size=40),
    prompt=st.integers(1, 5000),
    more=st.integers(0, 3000),
    start=st.integers(0, 6000),
    interval=st.integers(1, 40).map(lambda blocks: 64 * blocks),
    gap=st.integers(1, 200),
)
def test_each_position_saves_something_and_few_are_hints(
    hints: list[int], prompt: int, more: int, start: int, interval: int, gap: int
) -> None:
    taken = checkpoint_positions(hints, prompt, prompt + more, start, interval, gap)
    assert list(taken) == sorted(set(taken))
    last = max((hint for hint in hints if 0 < hint <= prompt), default=0)
    assert all(start + gap <= position <= prompt + more for position in taken if position != last)
    assert (last in taken) == (start < last) or last == prompt
    assert all(position in hints or position % interval == 0 or position == prompt for position in taken)
    assert sum(position % interval != 0 for position in taken) <= MOST_HINTS + 3
    close = [right - left for left, right in pairwise(taken) if right - left < gap]
    assert len(close) <= 1
