"""Shapes -> how the kernels of this folder are started. A pure function, as data."""

from dataclasses import dataclass

FEW_ROWS = 64
"""Up to here of x the fused kernel reads the codes once; above, tiles of the weight are decoded for cuBLAS."""
TILE_ELEMENTS = 2**25
"""Decoded at once for a product with many rows: 64 MiB of bfloat16."""
DECODE_ROWS = 32
"""Rows of a tile of the decoding kernel."""
_WAVES = 4
"""Programs a multiprocessor, so that loads of one hide behind another's."""
_MIN_BLOCKS = 4
"""A split reads at least so many blocks of 128 columns: fewer would write more partial sums than they read codes."""


@dataclass(frozen=True, slots=True)
class FewRows:
    tile: int
    """Rows of the weight a program."""
    batch: int
    """Rows of x, rounded up: 16, 32 or 64. One compiled kernel each."""
    splits: int
    """Of the columns; their sums are added in order by a second kernel."""
    warps: int


def few_rows(rows_x: int, rows: int, blocks: int, processors: int) -> FewRows:
    """`rows`: of the weight; `blocks`: of its columns; 1 <= rows_x <= FEW_ROWS."""
    batch = next(size for size in (16, 32, FEW_ROWS) if rows_x <= size)
    tile = 64
    wanted = -(-_WAVES * processors // -(-rows // tile))
    return FewRows(tile, batch, max(1, min(wanted, blocks // _MIN_BLOCKS)), warps=8 if batch == FEW_ROWS else 4)
