"""Plain torch, any device: the oracle."""

import torch
from torch import Tensor

from kernels.linear import packing
from kernels.linear.grouped import form
from kernels.linear.grouped import weight as grouped
from kernels.linear.grouped.weight import GroupedWeight
from kernels.linear.quantized import FP8_BLOCK, dequantize
from kernels.linear.weight import Weight, unpack


def decoded_rows(rows: Tensor, weight: Weight | GroupedWeight) -> Tensor:
    """rows int64 [n] -> float32 [n, columns]."""
    if not len(rows):
        return torch.empty(0, weight.columns, device=weight.device)
    if isinstance(weight, GroupedWeight):
        return form.dequantize(grouped.unpack(weight.take(rows)))
    codes, scales = weight.codes.index_select(packing.row_dim(weight.format, codes=True), rows), weight.scales
    if weight.format == "fp8-block":
        return _block_rows(rows, codes, weight)
    if scales is not None:
        scales = scales.index_select(packing.row_dim(weight.format, codes=False), rows)
    row_scale = None if weight.row_scale is None else weight.row_scale[rows]
    return dequantize(unpack(Weight(weight.format, len(rows), weight.columns, codes, scales, row_scale)))


def _block_rows(rows: Tensor, codes: Tensor, weight: Weight) -> Tensor:
    """`codes` [n, ...]: the gathered ones. They are no multiple of a block any more, so each row takes its block's
    scales along."""
    assert weight.scales is not None
    natural, _ = packing.unpack(weight.format, codes, None, len(rows), weight.columns)
    scales = weight.scales[rows // FP8_BLOCK].float().repeat_interleave(FP8_BLOCK, dim=1)
    return natural.view(torch.float8_e4m3fn).float() * scales[:, : weight.columns]
