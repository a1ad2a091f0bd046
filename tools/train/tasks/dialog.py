"""A dialog in ChatML as token ids with loss weights."""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tools.train.data.dataset import Ids
from tools.train.tasks.source import Source
from tools.train.tasks.wording import EMPTY_THOUGHT, OPEN_THOUGHT, SYSTEMS

ANSWER = 3.0
"""Loss weight of retrieved answers,"""
CALL = 2.0
"""of tool calls and chat answers,"""
THOUGHT = 1.0
"""of thoughts; text has 1, prompts 0."""

Mode = Literal["bare", "empty", "think"]
"""How an assistant turn starts: with the answer, with an empty think block, with a thought."""


MODES: tuple[Mode, ...] = ("bare", "empty", "think")
MODE_WEIGHTS = (25, 50, 25)


class Document(NamedTuple):
    ids: Ids
    weights: NDArray[np.float32]
    """weights[i] weighs the loss of predicting ids[i]; as long as ids."""


class Dialog:
    """Collects turns. Neighbouring text of one weight is encoded together; pieces of different weight meet only at
    added tokens or after a newline, where the pre-tokenizer splits anyway, so the ids equal those of the whole text.
    Only a run of haystack tokens may tokenize differently at its ends (a newline after its full stop)."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._parts: list[tuple[str | Ids, float]] = []

    def text(self, text: str, weight: float = 0.0) -> None:
        if self._parts:
            last, last_weight = self._parts[-1]
            if isinstance(last, str) and last_weight == weight:
                self._parts[-1] = (last + text, weight)
                return
        self._parts.append((text, weight))

    def tokens(self, ids: Ids) -> None:
        """Haystack; no loss."""
        self._parts.append((ids, 0.0))

    def system(self, first: str | None = None) -> None:
        """A system message: `first` (the tools), then one of the usual sentences or none; no message without any."""
        text = "\n\n".join(part for part in (first, self._source.rng.choice(SYSTEMS)) if part)
        if text:
            self.text(f"<|im_start|>system\n{text}<|im_end|>\n")

    def open_user(self) -> None:
        """Starts a user turn whose text follows; end it with `close`."""
        self.text("<|im_start|>user\n")

    def close(self) -> None:
        self.text("<|im_end|>\n")

    def user(self, text: str) -> None:
        self.open_user()
        self.text(text)
        self.close()

    def assistant(
        self,
        answer: str,
        thought: str,
        weight: float,
        mode: Mode | None = None,
        thought_weight: float = THOUGHT,
    ) -> None:
        """The generation prompt carries no loss; the thought (one line) is used in the mode "think" only."""
        if mode is None:
            mode = self._source.rng.choices(MODES, MODE_WEIGHTS)[0]
        self.text("<|im_start|>assistant\n")
        if mode == "empty":
            self.text(EMPTY_THOUGHT)
        elif mode == "think":
            self.text(OPEN_THOUGHT)
            self.text(f"{thought}\n</think>\n\n", thought_weight)
        self.text(answer, weight)
        self.text("<|im_end|>", weight)
        self.text("\n")

    def document(self) -> Document:
        ids: list[Ids] = []
        weights: list[NDArray[np.float32]] = []
        for part, weight in self._parts:
            encoded = self._source.dataset.encode(part) if isinstance(part, str) else part
            ids.append(encoded)
            weights.append(np.full(len(encoded), weight, np.float32))
        return Document(np.concatenate(ids), np.concatenate(weights))
