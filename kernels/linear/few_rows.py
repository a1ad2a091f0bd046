"""The matrix product with a small plain matrix and few rows of x, in one launch: cuBLAS takes longer to start and to
split such a product than the product takes.

Up to 16 rows of x a program takes one row of the matrix, and up to 4 of x, with all its loads in flight at once; it
reads the matrix before it waits for the kernel that writes x. That reads x once for every row of the matrix, so with
more rows it takes tiles, by matrix instructions.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.linear import few_rows_triton as kernels
from kernels.overlap import overlap

ROWS = 64
"""Of x, up to which it is meant."""
OUTPUTS = 512
COLUMNS = 8192
"""The largest matrix."""
_BY_ROW = 16
"""Rows of x."""
_AT_ONCE = 4
"""Rows of x a program: 10 KiB each of the 27B's, all in registers."""
_BLOCK = 1024
"""Columns: 16 bytes a thread of 4 warps."""
_TILE = {"BK": 64, "BM": 8, "BN": 16, "SLICES": 8, "STAGES": 4}
"""72 KiB of shared memory."""
_by_row: Any = kernels.by_row
_by_tile: Any = kernels.by_tile


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether `few_rows` takes them and is meant for them."""
    small = len(weight) <= OUTPUTS and weight.shape[1] <= COLUMNS and x.stride(-1) == weight.stride(-1) == 1
    return small and 0 < len(x) <= (ROWS if _tiles(x, weight) else _BY_ROW)


def few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
    pdl: bool | None = None,
) -> Tensor:
    """x W^T + b + residual, summed in float32 (cut off by matrix instructions where others round) and rounded once, to
    `dtype`. x [T, K], weight [N, K] with K at most COLUMNS and any stride of rows, bias [N] contiguous, residual [T, N]
    contiguous, each of any float dtype up to float32; numbers of a row follow each other. On a GPU or in Triton's
    interpreter; `pdl`: as of `kernels.overlap`; with it the matrix may be read before the kernel before has ended.
    """
    (rows, columns), outputs = x.shape, len(weight)
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    if not rows:
        return out
    arguments = (
        x, weight, out if bias is None else bias, out if residual is None else residual, out, rows, outputs,
        x.stride(0), weight.stride(0),
    )  # fmt: skip
    options = {"BIAS": bias is not None, "RESIDUAL": residual is not None, **overlap(x.device, pdl)}
    if rows <= _BY_ROW or not _tiles(x, weight):
        at_once = 1 if rows < _AT_ONCE - 1 else _AT_ONCE  # two spill a register for compute capability 9.0
        grid = (outputs, -(-rows // at_once))
        _by_row[grid](*arguments, K=columns, BK=_BLOCK, BM=at_once, num_warps=4, **options)
    else:
        grid = (-(-outputs // _TILE["BN"]), -(-rows // _TILE["BM"]))
        _by_tile[grid](*arguments, K=columns, **_TILE, HALF=x.is_cuda, num_warps=_TILE["SLICES"], **options)
    return out


def _tiles(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
