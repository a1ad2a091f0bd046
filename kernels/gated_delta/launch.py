"""Shapes -> launches, as data.

Equal launches give equal sums: `decode`, `verify` and `fold` take the same one, and it depends neither on the batch nor
on the GPU's size, so that a sequence gets the bits that it would get alone.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StateLaunch:
    columns: int
    """Of a state [K, V], a program: a power of two. Each reads rows of so many elements."""
    warps: int
    """A program. With one warp a sum over the keys is made in its registers."""


def state_launch(value_dim: int, item_bytes: int) -> StateLaunch:
    """item_bytes: of a state's element. Rows of 64 bytes: a head of 128 x 128 in float32 gives 8 programs of one warp,
    each with 8 KiB in its registers, so that one sequence of the 27B (384 programs a layer) is all in flight at once
    on 132 multiprocessors."""
    columns = 64 // item_bytes
    while columns > 1 and columns // 2 >= value_dim:
        columns //= 2
    return StateLaunch(columns, warps=1)


@dataclass(frozen=True, slots=True)
class SpanLaunch:
    rows: int
    """Tokens of a tile: no fewer than the columns of the convolution. The rows before a tile are read again."""
    elements: int
    """Of each row, a program: whole heads, a power of two."""
    warps: int


def span_launch(wide: int) -> SpanLaunch:
    """wide: the power of two that a head fits in. A warp has 128 elements of each row, 16 bytes a lane in float32, all
    of them in its registers."""
    elements = max(wide, 512)
    return SpanLaunch(rows=16, elements=elements, warps=max(1, min(elements // 128, 8)))
