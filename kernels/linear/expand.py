"""Packed weights to plain ones, on a GPU: for products with so many rows of x that decoding once and cuBLAS win."""

from typing import Any

import torch
import triton
from torch import Tensor

from kernels.linear import triton as kernels
from kernels.linear.packing import FP8, unit_columns
from kernels.linear.quantized import FORMATS
from kernels.linear.weight import Weight

_kernel: Any = kernels.expand
_ROWS = 64
"""Of a program. A unit's pairs of 64 rows and 16 columns fill whole 32-byte sectors of the output."""


def expand(weight: Weight, first: int, rows: int, out: Tensor) -> None:
    """Rows [first, first + rows) into out [rows, columns], contiguous, each value rounded once to its dtype."""
    unit = unit_columns(weight.format)
    codes = weight.codes.view(torch.int32) if weight.format in FP8 else weight.codes
    scales = codes if weight.scales is None else weight.scales
    half = scales.dtype == torch.float16
    if FORMATS[weight.format].integer:
        scales = scales.view(torch.int16)
    _kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(weight.columns, unit))](
        codes, scales, codes if weight.row_scale is None else weight.row_scale, out, first, rows, weight.rows,
        weight.columns, codes.stride(0), FORMAT=weight.format, UNIT=unit, BN=_ROWS, HALF=half, ASM=out.is_cuda,
    )  # fmt: skip
