"""Rows of activations to FP8, for products on FP8 tensor cores."""

from typing import Any

import torch
import triton
from torch import Tensor

from kernels.linear import triton as kernels

_BLOCK = 128
_kernel: Any = kernels.quantize_rows


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x bfloat16 [M, K] on a GPU with FP8 -> codes float8_e4m3fn [M, K up to a multiple of 128], in the order of bytes
    that `packing` gives fp8 weights, and scales float32 [M, 1]: x = codes * scale, rounded; scale = amax / 448."""
    rows, columns = x.shape
    padded = -(-columns // _BLOCK) * _BLOCK
    codes = torch.empty(rows, padded, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    wide = triton.next_power_of_2(padded)
    _kernel[(rows,)](x, codes, scales, columns, padded, x.stride(0), WIDE=wide, num_warps=8 if wide > 4096 else 4)
    return codes, scales
