"""Rows of one length, packed from documents of a mix of tasks."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tools.train.data.dataset import Ids
from tools.train.tasks.chat import chat
from tools.train.tasks.dialog import Document
from tools.train.tasks.facts import facts
from tools.train.tasks.induction import induction
from tools.train.tasks.needle import needle
from tools.train.tasks.source import Source
from tools.train.tasks.tools.episode import tools_dialog

Task = Literal["python", "english", "induction", "facts", "needle", "tools", "chat"]
Mix = Mapping[Task, float]
"""Share of the rows of each task; need not sum to 1."""
SHORTEST_TASK = 180
"""A rest of a row below this is filled with chat."""


class MicroBatch(NamedTuple):
    ids: NDArray[np.int32]
    """[rows, row_length]"""
    weights: NDArray[np.float32]
    """[rows, row_length]; see `Document.weights`."""


def micro_batch(source: Source, tokens: int, row_length: int, mix: Mix) -> MicroBatch:
    """tokens // row_length rows. Rows have no document mask: what stands before is context that does not help."""
    rows = [row(source, row_length, mix) for _ in range(tokens // row_length)]
    return MicroBatch(np.stack([r.ids for r in rows]), np.stack([r.weights for r in rows]))


def row(source: Source, length: int, mix: Mix) -> Document:
    """Exactly `length` tokens of one task; the last document is cut."""
    task = source.rng.choices(list(mix), list(mix.values()))[0]
    if task == "python" or task == "english":
        return text_row(source, length, task)
    parts: list[Document] = []
    have = 0
    while have < length:
        rest = length - have
        document = chat(source) if parts and rest < SHORTEST_TASK else draw(source, task, rest, length, first=not parts)
        parts.append(document)
        have += len(document.ids)
    ids = np.concatenate([part.ids for part in parts])[:length]
    weights = np.concatenate([part.weights for part in parts])[:length]
    return Document(ids, weights)


def text_row(source: Source, length: int, kind: Literal["python", "english"]) -> Document:
    """Corpus text, every token with weight 1; a corpus shorter than a row is repeated."""
    ids: Ids = source.text(kind, length)
    return Document(np.resize(ids, length), np.ones(length, np.float32))


def draw(source: Source, task: Task, rest: int, length: int, first: bool) -> Document:
    """A document for the `rest` of a row of `length`. Long rows start with a needle as long as they are."""
    rng = source.rng
    match task:
        case "needle":
            whole = first and length > 4096
            return needle(source, rest if whole else min(rest, int(rng.uniform(200, length))))
        case "facts":
            whole = first and source.chance(0.5)
            return facts(source, rest if whole else min(rest, int(rng.uniform(300, length))))
        case "tools":
            return tools_dialog(source, rest)
        case "induction":
            return induction(source, rest)
        case _:
            return chat(source)
