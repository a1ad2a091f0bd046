"""What a soak would say: of answers that differ, and of memory that grows."""

from typing import Any

from bench.soak import CALM, GROWTH, Sample, _growth
from bench.soak_agents import Record

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


def reply(text: str, prompt_tokens: int = 9) -> dict[str, Any]:
    return {
        "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": prompt_tokens, "samovar": {"cached_host": 5}},
    }


def test_an_answer_that_differs_is_wrong() -> None:
    record = Record()
    for text in ("one", "one", "two"):
        record.answered(BODY, reply(text))
    assert len(record.wrong) == 1
    assert "'two'" in record.wrong[0]
    assert (record.counts["repeats that agree"], record.counts["cached_host"]) == (1, 15)


def test_another_prompt_may_have_another_answer() -> None:
    record = Record()
    record.answered(BODY, reply("one"))
    record.answered({**BODY, "max_tokens": 3}, reply("two"))
    record.answered(BODY, reply("three", prompt_tokens=10))
    assert not record.wrong
    assert record.counts["repeats rendered otherwise"] == 1


def test_what_was_read_before_leaving_is_the_beginning_of_the_answer() -> None:
    record = Record()
    record.left(BODY, "not asked yet")
    record.answered(BODY, reply("one two"))
    record.left(BODY, "one")
    assert not record.wrong
    record.left(BODY, "two")
    assert record.wrong


def test_growth_is_of_the_calm_time_and_of_the_last_process() -> None:
    def samples(sizes: list[int]) -> list[Sample]:
        before = [Sample(0.1, {"engine": (1, 900)}), Sample(CALM + 0.01, {"engine": (1, 5)})]
        return before + [Sample(CALM + 0.02, {"engine": (2, size)}) for size in sizes]

    assert _growth(samples([100] * 9), "engine") == 1
    assert _growth(samples([100] * 3 + [150] * 6), "engine") > GROWTH
    assert _growth(samples([100] * 4), "engine") == 1, "too little to say"
    assert _growth(samples([100] * 9), "gateway") == 1
