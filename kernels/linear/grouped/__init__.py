"""Matrix products with weights quantized in groups (`form`), kept as `weight.GroupedWeight`."""

import torch
from torch import Tensor

from kernels.gpu import gpu
from kernels.linear.grouped import launch, reference
from kernels.linear.grouped.weight import GroupedWeight


def linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None = None) -> Tensor:
    """x W^T + b. x [T, K] of a float dtype, bias [N] -> contiguous [T, N] of x's dtype.

    Up to launch.FEW_ROWS rows on a GPU the exact codes meet x and each group's sum is scaled in float32, so that no
    weight is rounded; with more rows, weights are rounded to x's dtype. Equal inputs give equal bits."""
    if x.device.type == "cpu":
        return reference.linear(x, weight, bias)
    from kernels.linear.grouped import fused  # triton exists on Linux only

    x = x.contiguous()
    if len(x) == 0:
        return x.new_empty((0, weight.rows))
    if len(x) <= launch.FEW_ROWS:
        processors = gpu(x.device).processors
        return fused.few_rows(x, weight, bias, processors, fused.dot_type(x.dtype))
    out = x.new_empty((len(x), weight.rows))
    step = max(1, launch.TILE_ELEMENTS // weight.columns)
    for first in range(0, weight.rows, step):
        count = min(step, weight.rows - first)
        tile = fused.decode(weight.narrow(first, count), x.dtype)
        out[:, first : first + count] = torch.nn.functional.linear(x, tile)
    return out if bias is None else out.add_(bias)


def decode(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """[N, K], each value rounded once. For a few rows: `decode(weight.take(ids), dtype)`, an embedding's."""
    if weight.device.type == "cpu":
        return reference.decode(weight, dtype)
    from kernels.linear.grouped import fused  # triton exists on Linux only

    return fused.decode(weight, dtype)
