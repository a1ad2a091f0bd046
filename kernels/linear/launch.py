"""Shapes and GPU -> routes and launches. Pure functions, as data.

Measured on an H200 with `make bench-linear`; `docs/benchmarks/linear-h200.json` has what came out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

STREAM_ROWS = 64
"""Up to here of x the codes are read once, by `stream`; above, decoding them for cuBLAS is faster."""
_TILE_BYTES = 2**27
"""Of weights decoded at once."""
_TILE_ROWS = 2048
"""A tile's rows are a multiple, so that cuBLAS's tiles of 128 or 256 fill their waves."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Of `stream`."""

    rows: int
    """Of the matrix, a program."""
    slices: int
    """Of the columns, worked on at once by as many groups of warps of a program."""
    units: int
    """Of columns (`packing.unit_columns`), a slice and round of the loop."""
    splits: int
    """Programs that share the columns of a tile."""
    warps: int
    stages: int
    pdl: bool = False
    """Begin while the kernel before still runs (programmatic dependent launch, compute capability 9.0 and up)."""


_MEASURED: Mapping[tuple[str, int, int], Launch] = {
    ("nvfp4", 34816, 5120): Launch(64, 2, 1, 2, 2, 3),
    ("fp8", 34816, 5120): Launch(16, 4, 1, 1, 4, 3, pdl=True),
    ("fp8", 5120, 6144): Launch(16, 4, 1, 1, 4, 4, pdl=True),
    ("int4-g64", 14336, 5120): Launch(64, 2, 2, 1, 2, 3, pdl=True),
    ("int4-g64", 16384, 5120): Launch(32, 2, 2, 1, 2, 3, pdl=True),
    ("int4-g64", 5120, 17408): Launch(64, 2, 2, 3, 2, 3),
    ("int3-g128", 34816, 5120): Launch(64, 2, 1, 1, 2, 3, pdl=True),
    ("int3-g128", 248320, 5120): Launch(64, 2, 1, 1, 2, 3, pdl=True),
}
"""(format, rows, columns): up to 8 rows of x on an H200, where a sweep found better than the rule chooses
(docs/benchmarks/linear.md)."""
_MEASURED_SEVERAL: Mapping[tuple[str, int, int], Launch] = {("int3-g128", 5120, 17408): Launch(64, 2, 1, 6, 2, 3)}
"""The same, but from 2 rows of x on: with one row the rule's launch was faster."""
_STAGES = {"nvfp4": 3, "int4-g64": 3, "int3-g128": 3, "int5-g64": 2, "fp8": 4, "fp8-block": 4}
_PROGRAMS = 3.6
"""A multiprocessor, from which on another split costs more than it brings (two warps a program)."""


def tile_rows(columns: int, itemsize: int) -> int:
    """Rows of a matrix that are decoded at once for a product with many rows of x; `itemsize`: bytes of an element of
    x."""
    return max(_TILE_ROWS, _TILE_BYTES // (columns * itemsize) // _TILE_ROWS * _TILE_ROWS)


def stream_launch(
    format: str, rows: int, columns: int, unit: int, batch: int, processors: int, capability: tuple[int, int]
) -> Launch:
    """batch: rows of x, 1 to STREAM_ROWS. processors: multiprocessors."""
    if batch <= 8 and capability[0] == 9:
        key = format, rows, columns
        measured = _MEASURED.get(key) or (_MEASURED_SEVERAL.get(key) if batch > 1 else None)
        if measured is not None:
            return measured
    tile = 32 if format in ("fp8", "fp8-block", "int3-g128", "int5-g64", "int8-g32") and batch <= 8 else 64
    stages = _STAGES.get(format, 3)
    if batch > 16 or capability[0] != 9:  # 99 KiB of shared memory, and more of it for x
        stages = min(stages, 3)
    tiles = -(-rows // tile)
    rounds = -(-columns // (unit * 2))
    splits = max(1, min(round(_PROGRAMS * processors / tiles), rounds // 2, 16))
    return Launch(tile, 2, 1, splits, 2, stages, splits == 1 and capability >= (9, 0))
