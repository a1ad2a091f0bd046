"""Tool calls: which part of them is right, on cases that no training row shows."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tools.train.data.dataset import Dataset
from tools.train.data.vocabulary import END_OF_TURN
from tools.train.evaluation.decoding import agreement, greedy
from tools.train.evaluation.probes import PROBES
from tools.train.model import TrainModel
from tools.train.tasks.source import Source
from tools.train.tasks.tools.episode import ToolCase, tool_case
from tools.train.tasks.tools.held_out import TRAINING, UNSEEN, UNSEEN_NAMES, UNSEEN_PHRASINGS, Holdout
from tools.train.tasks.tools.kit import Family

PARAMETER = r"<parameter=[^>\n]+>\n(?:(?!</?(?:parameter|function|tool_call)\b).)*\n</parameter>\n"
WELL_FORMED = re.compile(
    rf"<tool_call>\n<function=[^>\n]+>\n(?:{PARAMETER})*</function>\n</tool_call>"
    rf"(?:\n<tool_call>\n<function=[^>\n]+>\n(?:{PARAMETER})*</function>\n</tool_call>)*",
    re.DOTALL,
)
LONGEST_CALL = 200
"""Tokens of greedy decoding."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table: cases of one kind."""

    label: str
    family: Family
    holdout: Holdout
    asks: int = 1


CELLS = (
    Cell("named, unseen names", "named", UNSEEN),
    Cell("named, unseen names, two calls", "named", UNSEEN, asks=2),
    Cell("coding, as trained", "coding", TRAINING),
    Cell("coding, unseen names", "coding", UNSEEN_NAMES),
    Cell("coding, unseen phrasings", "coding", UNSEEN_PHRASINGS),
    Cell("coding, both unseen", "coding", UNSEEN),
    Cell("coding, both unseen, two calls", "coding", UNSEEN, asks=2),
    Cell("everyday, both unseen", "everyday", UNSEEN),
    Cell("composed, as trained", "composed", TRAINING),
    Cell("composed, both unseen", "composed", UNSEEN),
    Cell("composed, both unseen, two calls", "composed", UNSEEN, asks=2),
)
THINKING_CELLS = (Cell("named, with a thought", "named", UNSEEN), Cell("coding, with a thought", "coding", UNSEEN))


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of the cases, or None where it was not measured."""

    cases: int
    exact: float
    name_right: float | None = None
    """Everything to the end of the first function's name."""
    well_formed: float | None = None


def is_well_formed(text: str) -> bool:
    """One or more calls and nothing else."""
    return WELL_FORMED.fullmatch(text) is not None


def draw_cases(source: Source, cell: Cell, count: int, think: bool = False) -> list[ToolCase]:
    return [
        tool_case(source, cell.family, cell.holdout, source.rng.randint(1, 5), cell.asks, think) for _ in range(count)
    ]


def forced_score(model: TrainModel, dataset: Dataset, cases: Iterable[tuple[str, str]]) -> Score:
    """Of (prompt, answer) pairs, by one forward pass each."""
    prompts, answers = zip(*cases, strict=True)
    expected = [dataset.encode(answer + END_OF_TURN) for answer in answers]
    agreed = agreement(model, [dataset.encode(prompt) for prompt in prompts], expected)
    names = [len(dataset.encode(answer[: answer.index(">\n", answer.index("<function=")) + 2])) for answer in answers]
    return Score(
        cases=len(agreed),
        exact=mean(count == len(ids) for count, ids in zip(agreed, expected, strict=True)),
        name_right=mean(count >= needed for count, needed in zip(agreed, names, strict=True)),
    )


def greedy_score(model: TrainModel, dataset: Dataset, cases: Sequence[ToolCase]) -> Score:
    """By decoding; a thought before the calls is not judged."""
    prompts = [dataset.encode(case.prompt) for case in cases]
    outputs = greedy(model, prompts, LONGEST_CALL, dataset.token_id(END_OF_TURN))
    texts = [dataset.decode(ids).split("</think>\n\n")[-1] for ids in outputs]
    return Score(
        cases=len(cases),
        exact=mean(text == case.answer for text, case in zip(texts, cases, strict=True)),
        name_right=mean(function_names(t) == function_names(c.answer) for t, c in zip(texts, cases, strict=True)),
        well_formed=mean(map(is_well_formed, texts)),
    )


def function_names(text: str) -> list[str]:
    return re.findall(r"<function=([^>\n]+)>", text)


def probe_score(model: TrainModel, dataset: Dataset) -> tuple[Score, list[str]]:
    """Of the hand-written requests, and the requests that were not answered exactly."""
    scores = [forced_score(model, dataset, [(probe.prompt(), probe.answer())]) for probe in PROBES]
    missed = [probe.user for probe, score in zip(PROBES, scores, strict=True) if score.exact < 1]
    exact = mean(score.exact for score in scores)
    return Score(len(PROBES), exact, mean(score.name_right or 0.0 for score in scores)), missed


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
