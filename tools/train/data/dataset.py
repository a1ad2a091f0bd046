"""A prepared data folder: tokenizer, token files, word list."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tools.train.data.vocabulary import ADDED_TOKENS

Ids = NDArray[np.int32]
"""Token ids [n]."""
Split = Literal["train", "held"]
TextKind = Literal["python", "english"]
TEXT_KINDS: tuple[TextKind, ...] = ("python", "english")


@dataclass(frozen=True, slots=True)
class TextSize:
    """Of one token file, for bits per byte."""

    tokens: int
    bytes: int


class Dataset:
    """One split of the folder that `prepare` wrote. Read only; token files are memory-mapped. One a process.

    Raises FileNotFoundError for a folder that is not a prepared one."""

    def __init__(self, folder: Path, split: Split) -> None:
        self.folder = folder
        self.split: Split = split
        self.tokenizer: Tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text())
        self.vocab_size: int = self.tokenizer.get_vocab_size()
        self.words = (folder / "words.txt").read_text().split()
        """Common first."""
        self.texts: dict[TextKind, NDArray[np.uint16]] = {
            kind: np.load(folder / f"{kind}.{split}.npy", mmap_mode="r") for kind in TEXT_KINDS
        }
        sizes = json.loads((folder / "sizes.json").read_text())
        self.sizes: dict[TextKind, TextSize] = {kind: TextSize(**sizes[f"{kind}.{split}"]) for kind in TEXT_KINDS}
        self.encode = functools.lru_cache(200_000)(self._encode)

    @property
    def ordinary_ids(self) -> int:
        """Ids below this are text; the added tokens follow."""
        return self.vocab_size - len(ADDED_TOKENS)

    def _encode(self, text: str) -> Ids:
        """Added tokens in the text become their ids. Cached: do not write into the result."""
        ids = np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)
        ids.flags.writeable = False
        return ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def token_id(self, token: str) -> int:
        """Raises ValueError for a token that the vocabulary lacks."""
        found = self.tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"the tokenizer has no token {token}")
        return found
