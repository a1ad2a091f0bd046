"""What it would take to compute a part of a context again: what a cache weighs against the bytes that keep it."""

from services.protocol.hashing import BLOCK_TOKENS

ATTENTION_DEPTH = 32768
"""Tokens of context at which attention costs as much as all else. A round figure for models of 0.1 to 30 billion
parameters; only the order of blocks among each other depends on it."""

_SMOOTHING = 0.1


def weight(start: int, end: int) -> float:
    """The tokens at [start, end), in tokens at a context's beginning that cost as much."""
    return (end - start) * (1 + (start + end) / 2 / ATTENTION_DEPTH)


class RecomputeCost:
    """Seconds of a token at position p = rate * (1 + p / ATTENTION_DEPTH); the rate is measured as prefills run."""

    def __init__(self) -> None:
        self._rate = 1e-3
        self._measured = False

    def observe(self, chunks: list[tuple[int, int]], seconds: float) -> None:
        """A step that mostly prefilled took `seconds` for these (start, tokens)."""
        tokens = sum(weight(start, start + count) for start, count in chunks)
        if tokens <= 0 or seconds <= 0:
            return
        sample = seconds / tokens
        self._rate = self._rate + _SMOOTHING * (sample - self._rate) if self._measured else sample
        self._measured = True

    def of(self, depth: int) -> float:
        """Seconds for the block at `depth` of its chain."""
        return self.between(depth * BLOCK_TOKENS, (depth + 1) * BLOCK_TOKENS)

    def between(self, start: int, end: int) -> float:
        """Seconds for the tokens at [start, end)."""
        return weight(start, end) * self._rate
