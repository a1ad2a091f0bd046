"""Where a task draws from: one seeded stream of choices over one dataset."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tools.train.data.dataset import Dataset, Ids, TextKind
from tools.train.tasks.wording import ANIMALS, PANGRAMS

Filler = Literal["pangrams", "words", "english", "python", "mixed"]
FILLERS: tuple[Filler, ...] = ("pangrams", "words", "english", "python", "mixed")
FILLER_WEIGHTS = (45, 10, 20, 15, 10)
COMMON_WORDS = 3000
SPECIAL_REPLACEMENT = 10
"""An ordinary id that stands where text files carry an added token: no turn may end inside a message."""


@dataclass(frozen=True, slots=True)
class WordTable:
    """Token ids of many words, one after the other: word i is flat[start[i] : start[i] + length[i]]."""

    flat: Ids
    start: NDArray[np.int64]
    length: NDArray[np.int64]

    @classmethod
    def of(cls, dataset: Dataset, words: Sequence[str]) -> "WordTable":
        """Each word with the blank before it."""
        parts = [dataset.encode(" " + word) for word in words]
        length = np.array([len(part) for part in parts])
        return cls(np.concatenate(parts), np.cumsum(length) - length, length)

    def tokens(self, n: int, numbers: np.random.Generator) -> Ids:
        """Exactly n >= 1 tokens of random words; the last one may be cut."""
        # half as many again as the mean asks for: with hundreds of words it always suffices
        picked = numbers.integers(0, len(self.length), size=int(n / self.length.mean() * 1.5) + 64)
        length = self.length[picked]
        end = np.cumsum(length)
        index = np.repeat(self.start[picked] - (end - length), length) + np.arange(end[-1])
        return self.flat[index[:n]] if end[-1] >= n else np.resize(self.flat[index], n)


class Tables:
    """What is computed once a process for all sources of a dataset."""

    def __init__(self, dataset: Dataset) -> None:
        self.pangrams = WordTable.of(dataset, PANGRAMS)
        self.words = WordTable.of(dataset, dataset.words[:COMMON_WORDS])


class Source:
    """Equal datasets and seeds give equal draws on every machine. Not shared between threads."""

    def __init__(self, dataset: Dataset, seed: str, tables: Tables | None = None) -> None:
        self.dataset = dataset
        self.tables = tables or Tables(dataset)
        self.rng = random.Random(seed)
        self.numbers = np.random.default_rng(self.rng.getrandbits(64))

    def reseeded(self, seed: str) -> "Source":
        """A source of the same dataset at the start of another stream; cheap."""
        return Source(self.dataset, seed, self.tables)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def word(self) -> str:
        return self.rng.choice(self.dataset.words)

    def words(self, fewest: int, most: int) -> str:
        return " ".join(self.word() for _ in range(self.rng.randint(fewest, most)))

    def pseudo_word(self) -> str:
        """Two to four syllables that mean nothing."""
        rng = self.rng
        return "".join(
            rng.choice("bcdfghklmnprstvwz") + rng.choice("aeiou") + rng.choice(["", "", "n", "r", "s", "l"])
            for _ in range(rng.randint(2, 4))
        )

    def digits(self, n: int) -> str:
        return "".join(self.rng.choice("0123456789") for _ in range(n))

    def code(self) -> str:
        """A short code as a needle or an id, no blanks in it."""
        rng = self.rng
        form = rng.random()
        word = self.pseudo_word() if self.chance(0.3) else self.word()
        if self.chance(0.2):
            word = rng.choice(ANIMALS)
        if form < 0.65:
            return f"{word}-{rng.randrange(1000, 10000)}"
        if form < 0.75:
            return f"{word}-{self.word()}"
        if form < 0.85:
            return self.digits(rng.randint(3, 8))
        if form < 0.93:
            return f"{word.upper()}-{self.digits(rng.randint(1, 3))}"
        return f"{word}{self.digits(2)}"

    def text(self, kind: TextKind, n: int) -> Ids:
        """n consecutive tokens of the corpus (fewer if it is smaller), from a random place; added tokens may occur."""
        tokens = self.dataset.texts[kind]
        start = int(self.numbers.integers(0, max(1, len(tokens) - n)))
        return np.asarray(tokens[start : start + n], dtype=np.int32)

    def passage(self, kind: TextKind, n: int) -> Ids:
        """As `text`, without added tokens: safe inside a message."""
        ids = self.text(kind, n)
        return np.where(ids < self.dataset.ordinary_ids, ids, SPECIAL_REPLACEMENT).astype(np.int32)

    def passage_text(self, kind: TextKind, n: int) -> str:
        """About n tokens of the corpus as text that survives inside a prompt and a call: no opening angle brackets, no
        broken characters, stripped; never empty."""
        text = self.dataset.decode(self.passage(kind, n).tolist()).replace("<", "(").replace("\ufffd", "").strip()
        return text or self.word()

    def filler(self, n: int, kind: Filler | None = None) -> Ids:
        """n tokens of haystack."""
        kind = kind or self.rng.choices(FILLERS, FILLER_WEIGHTS)[0]
        if n <= 0:
            return np.zeros(0, np.int32)
        if kind == "pangrams":
            return self.tables.pangrams.tokens(n, self.numbers)
        if kind == "words":
            return self.tables.words.tokens(n, self.numbers)
        if kind == "mixed":
            first = self.rng.randrange(n + 1)
            return np.concatenate([self.filler(first), self.filler(n - first)])
        return self.passage(kind, n)
