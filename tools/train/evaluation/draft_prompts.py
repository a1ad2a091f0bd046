"""Prompts behind which the drafts of the MTP head are judged: held-out text and held-out cases of the trained tasks."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from tools.train.tasks.chat import small_talk
from tools.train.tasks.source import Source
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


def save_prompts(path: Path, prompts: Sequence[DraftPrompt]) -> None:
    """JSON lines."""
    path.write_text("".join(json.dumps(asdict(each), ensure_ascii=False) + "\n" for each in prompts), encoding="utf-8")


def load_prompts(path: Path) -> list[DraftPrompt]:
    return [DraftPrompt(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
