"""Hints: where later prompts may part from this one, on exact token boundaries."""

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.prompt.boundaries import MAX_HINTS, Boundaries

TURN, THINK = 1, 2
CHATML = Boundaries(TURN, THINK)


def test_before_each_turn_and_before_the_thoughts_of_the_suffix() -> None:
    #      system        user          answer with thoughts  suffix
    ids = [TURN, 9, 9, TURN, 9, TURN, 9, THINK, 9, 9, TURN, 9, THINK, 9]
    assert CHATML.hints(ids) == (3, 5, 10, 12)


def test_a_suffix_without_thoughts_and_a_text_in_front_of_the_first_turn() -> None:
    assert CHATML.hints([9, TURN, 9, THINK, TURN, 9]) == (1, 4)
    assert CHATML.hints([TURN, 9]) == ()
    assert CHATML.hints([]) == ()


def test_a_vocabulary_without_such_tokens_has_no_hints() -> None:
    assert Boundaries(None, None).hints([1, 2, 3]) == ()
    assert Boundaries(None, THINK).hints([1, 9, THINK, 9]) == (2,)


def test_the_tokens_are_found_by_their_text() -> None:
    assert Boundaries.of({"<|im_start|>": 7, "<think>": 8, "<|im_end|>": 9}.get) == Boundaries(7, 8)
    assert Boundaries.of({"<start_of_turn>": 3}.get) == Boundaries(3, None)
    assert Boundaries.of({}.get) == Boundaries(None, None)


def test_of_many_the_first_and_the_last_are_kept() -> None:
    places = CHATML.hints([TURN, 9] * 1000)
    assert len(places) == MAX_HINTS
    assert places[:16] == tuple(range(2, 34, 2))
    assert places[16:] == tuple(range(2000 - 2 * (MAX_HINTS - 16), 2000, 2))


@given(st.lists(st.sampled_from([TURN, THINK, 9]), max_size=40))
def test_hints_ascend_within_the_prompt(ids: list[int]) -> None:
    places = CHATML.hints(ids)
    assert list(places) == sorted(set(places))
    assert all(0 < place < len(ids) and ids[place] in (TURN, THINK) for place in places)
    assert {place for place, id in enumerate(ids) if id == TURN and place} <= set(places)
