"""A random sequence twice: the second half can be known from the first. Teaches copying early in a training."""

import numpy as np

from tools.train.tasks.dialog import Document
from tools.train.tasks.source import Source


def induction(source: Source, tokens: int) -> Document:
    """At most `tokens` (but at least 64) tokens; loss on the second half only."""
    half = source.rng.randint(32, max(33, min(tokens // 2, 700)))
    if source.chance(0.6):
        sequence = source.numbers.integers(0, source.dataset.ordinary_ids, half).astype(np.int32)
    else:
        sequence = source.tables.words.tokens(half, source.numbers)
    weights = np.concatenate([np.zeros(half, np.float32), np.ones(half, np.float32)])
    return Document(np.concatenate([sequence, sequence]), weights)
