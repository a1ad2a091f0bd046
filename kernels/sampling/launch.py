"""Shapes -> launches, as data. A draw does not depend on them: all its sums are of integers."""

from dataclasses import dataclass

MOST_SEGMENTS = 256
_BLOCK = 1024
_A_PROCESSOR = 2
"""Programs of `draw` that a multiprocessor has place for: 8 warps each, of 128 registers at most."""
_LARGEST_TOTAL = 61
"""log2 of what the weights of a row add up to at most: twice a total must be an int64."""
_FINEST = 50


@dataclass(frozen=True, slots=True)
class DrawLaunch:
    segments: int
    """Of the vocabulary, MOST_SEGMENTS at most: what the draw knows the weight of before it looks for the token."""
    span: int
    """Blocks of a segment."""
    parts: int
    """Programs that share a row. They wait for each other, so all rows' together must fit on the device at once."""
    each: int
    """Segments of a program."""
    one_bits: int
    """The highest weight of a row is 2^this."""
    block: int = _BLOCK
    """Logits that a program looks at, at once."""
    warps: int = 8


def draw_launch(rows: int, vocabulary: int, processors: int) -> DrawLaunch:
    """Few rows have one program a multiprocessor, which is enough and makes for shorter meetings; many have two."""
    all_blocks = -(-vocabulary // _BLOCK)
    span = -(-all_blocks // MOST_SEGMENTS)
    segments = -(-all_blocks // span)
    wanted = max(1, min(_A_PROCESSOR * processors // rows, processors, segments))
    each = -(-segments // wanted)
    one_bits = min(_FINEST, _LARGEST_TOTAL - (vocabulary - 1).bit_length())
    return DrawLaunch(segments, span, -(-segments // each), each, one_bits)
