"""Rows of a packed matrix, gathered and decoded in one launch."""

from typing import Any

import torch
from torch import Tensor

from kernels.embedding import triton as kernels
from kernels.linear.packing import FP8, unit_columns
from kernels.linear.quantized import FORMATS
from kernels.linear.weight import Weight
from kernels.overlap import overlap

_ROWS = 4
"""A program; a warp each."""
_UNITS = 4
"""A program, of 32 bytes of codes a plane."""
_take: Any = kernels.take


def take(rows: Tensor, weight: Weight, dtype: torch.dtype, pdl: bool | None = None) -> Tensor:
    """rows int64 or int32 [n], each in [0, weight's rows) -> `dtype` [n, columns], each value rounded once to float32
    as `dequantize` does, and from there. On a GPU, where it waits for nothing and reads the numbers there, or in
    Triton's interpreter. `pdl`: as of `kernels.overlap`."""
    count = len(rows)
    out = torch.empty(count, weight.columns, dtype=dtype, device=weight.device)
    if not count:
        return out
    fp8 = weight.format in FP8
    codes = weight.codes.view(torch.int32) if fp8 else weight.codes
    scales = codes if weight.scales is None else weight.scales
    half = scales.dtype == torch.float16
    if FORMATS[weight.format].integer:
        scales = scales.view(torch.int32)
    unit, units = unit_columns(weight.format), 1 if fp8 else _UNITS
    at_once = 1 if count < _ROWS else _ROWS
    _take[(-(-count // at_once), -(-weight.columns // (unit * units)))](
        rows.contiguous(), codes, scales, codes if weight.row_scale is None else weight.row_scale, out, count,
        weight.rows, weight.columns, codes.stride(0), FORMAT=weight.format, UNIT=unit, COUNT=at_once, UNITS=units,
        HALF=half, ASM=out.is_cuda, num_warps=at_once, **overlap(out.device, pdl),
    )  # fmt: skip
    return out
