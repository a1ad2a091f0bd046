"""Prompts behind which the drafts of the MTP head are judged: held-out text and held-out cases of the trained tasks."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from tools.train.data.dataset import Dataset, TextKind
from tools.train.tasks.chat import small_talk
from tools.train.tasks.source import SPECIAL_REPLACEMENT, Source
from tools.train.tasks.tools.episode import tool_case
from tools.train.tasks.tools.held_out import UNSEEN
from tools.train.tasks.wording import EMPTY_THOUGHT, SYSTEM

DraftKind = Literal["code", "English", "chat", "tool calls"]
DRAFT_KINDS: tuple[DraftKind, ...] = get_args(DraftKind)
PASSAGE_TOKENS = 200
"""Of code and English, which the model goes on with."""
TWO_CALLS = 0.15
"""Share of the tool prompts that ask for two calls, as in the card's set."""


@dataclass(frozen=True, slots=True)
class DraftPrompt:
    kind: DraftKind
    text: str


def chat_prompt(question: str) -> str:
    return (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
        f"<|im_start|>assistant\n{EMPTY_THOUGHT}"
    )


def draft_prompts(source: Source, count: int) -> list[DraftPrompt]:
    """`count` of each kind. `source` is to be of the held-out split."""
    return [DraftPrompt(kind, draw_text(source, kind)) for kind in DRAFT_KINDS for _ in range(count)]


def draw_text(source: Source, kind: DraftKind) -> str:
    match kind:
        case "code":
            return passage(source, "python")
        case "English":
            return passage(source, "english")
        case "chat":
            return chat_prompt(small_talk(source).question)
        case "tool calls":
            asks = 2 if source.chance(TWO_CALLS) else 1
            return tool_case(source, "named", UNSEEN, source.rng.randint(1, 5), asks).prompt


def passage(source: Source, kind: Literal["python", "english"]) -> str:
    """About PASSAGE_TOKENS tokens; characters that the cut broke are left out."""
    return source.dataset.decode(source.passage(kind, PASSAGE_TOKENS).tolist()).strip("\ufffd")


def text_windows(dataset: Dataset, count: int) -> list[DraftPrompt]:
    """`count` passages of code, then of English, with no draw: the split is cut into windows of PASSAGE_TOKENS tokens
    from its start to its end, of which every n-th is taken, evenly over the whole. Raises ValueError where there are
    fewer than `count`."""
    return [DraftPrompt("code", text) for text in windows(dataset, "python", count)] + [
        DraftPrompt("English", text) for text in windows(dataset, "english", count)
    ]


def windows(dataset: Dataset, kind: TextKind, count: int) -> list[str]:
    tokens = dataset.texts[kind]
    whole = len(tokens) // PASSAGE_TOKENS
    if whole < count:
        raise ValueError(f"{kind}: the split {dataset.split!r} has {whole} windows, {count} are asked for")
    starts = [number * whole // count * PASSAGE_TOKENS for number in range(count)]
    rows = [np.asarray(tokens[start : start + PASSAGE_TOKENS], dtype=np.int32) for start in starts]
    ordinary = [np.where(row < dataset.ordinary_ids, row, SPECIAL_REPLACEMENT).tolist() for row in rows]
    return [dataset.decode(ids).strip("\ufffd") for ids in ordinary]


def save_prompts(path: Path, prompts: Sequence[DraftPrompt]) -> None:
    """JSON lines."""
    path.write_text("".join(json.dumps(asdict(each), ensure_ascii=False) + "\n" for each in prompts), encoding="utf-8")


def load_prompts(path: Path) -> list[DraftPrompt]:
    return [DraftPrompt(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
