"""Plain torch, any device: the oracle."""

import torch
from torch import Tensor

from kernels.linear.grouped.form import dequantize
from kernels.linear.grouped.weight import GroupedWeight, unpack

_CHUNK_ELEMENTS = 2**24
"""Decoded at once: 64 MiB of float32."""


def decode(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """[N, K]."""
    return dequantize(unpack(weight)).to(dtype)


def linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None) -> Tensor:
    """Weights in float32, products summed in float32."""
    wide = x.float()
    step = max(1, _CHUNK_ELEMENTS // weight.columns)
    pieces = [
        torch.nn.functional.linear(wide, decode(weight.narrow(first, min(step, weight.rows - first)), torch.float32))
        for first in range(0, weight.rows, step)
    ]
    out = torch.cat(pieces, dim=-1)
    return (out if bias is None else out + bias.float()).to(x.dtype)
