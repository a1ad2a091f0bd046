"""Shapes -> launches, as data. A draw does not depend on them: all its sums are of integers."""

from dataclasses import dataclass

_BLOCK = 1024
_MOST_PARTS = 256
_LARGEST_TOTAL = 61
"""log2 of what the weights of a row add up to at most: twice a total must be an int64."""
_FINEST = 50


@dataclass(frozen=True, slots=True)
class DrawLaunch:
    parts: int
    """Programs that share a row. They wait for each other, so all rows' together are no more than the multiprocessors,
    of which each holds one at least."""
    chunk: int
    """Logits of a program."""
    one_bits: int
    """The highest weight of a row is 2^this."""
    block: int = _BLOCK
    """Logits that a program looks at, at once."""
    few: int = 256
    """And that it sorts into bins, at once."""
    warps: int = 8


def draw_launch(rows: int, vocabulary: int, processors: int) -> DrawLaunch:
    wanted = max(1, min(processors // rows, -(-vocabulary // _BLOCK), _MOST_PARTS))
    chunk = -(-vocabulary // (wanted * 16)) * 16
    one_bits = min(_FINEST, _LARGEST_TOTAL - (vocabulary - 1).bit_length())
    return DrawLaunch(-(-vocabulary // chunk), chunk, one_bits)
