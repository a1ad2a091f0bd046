"""Matrix products with weights, plain and packed.

A weight [outputs, inputs] is a plain tensor of x's dtype, a `weight.Weight` or a `grouped.GroupedWeight`. Products with
packed ones round nothing but the result up to `launch.STREAM_ROWS` rows of bfloat16 on a GPU; with more rows, weights
are rounded to x's dtype first or, fp8, x is quantized to FP8 per row. On a CPU they are the reference. Equal calls give
equal bits.
"""

import torch
from torch import Tensor

from kernels.elementwise import add, silu_gated
from kernels.linear import grouped, reference
from kernels.linear.grouped.weight import GroupedWeight
from kernels.linear.weight import Weight

_FEW_ROWS = 32
"""Up to here the transposed product is faster on a CPU. 30 matrices of [3072, 576], float32, MKL on 2 cores of an EPYC,
ms plain / transposed: 1 row 19.5 / 10.7, 2 rows 38 / 10.4, 8 rows 25 / 17, 32 rows 49 / 35."""


def linear(
    x: Tensor,
    weight: Tensor | Weight | GroupedWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x W^T + b + residual, contiguous. x [T, inputs] of a float dtype, bias [outputs] of the same, residual
    [T, outputs] of it or float32. Returns `dtype`, or without one x's, with a residual the residual's. Where that is
    float32 and the weights are plain, nothing is rounded to a half-precision x's dtype on the way."""
    if dtype is None:
        dtype = x.dtype if residual is None else residual.dtype
    if x.is_cuda and not isinstance(weight, GroupedWeight):
        out = _on_gpu(x, weight, bias, None if residual is None else residual.contiguous(), dtype)
        if out is not None:
            return out
    if isinstance(weight, Tensor) and dtype == torch.float32 != x.dtype:
        out = reference.linear_float32(x, weight, bias)
    else:
        out = _plain(x, weight, bias)
    return (out if residual is None else add(residual, out)).to(dtype)


def swiglu(x: Tensor, weight: Tensor | Weight | GroupedWeight) -> Tensor:
    """silu(g) * u (Shazeer 2020), where [g | u] = x W^T: the upper half of the rows is of the gate. Returns [T,
    outputs / 2] of x's dtype."""
    if isinstance(weight, Weight) and x.is_cuda:
        from kernels.linear import routes  # triton exists on Linux only

        return routes.product(x, weight, None, x.dtype, swiglu=True)
    return silu_gated(_plain(x, weight, None))


def _on_gpu(
    x: Tensor, weight: Tensor | Weight, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """By a kernel of ours, where there is one; residual contiguous."""
    from kernels.linear import few_rows, routes  # triton exists on Linux only

    if isinstance(weight, Weight):
        if bias is not None:
            residual = bias.expand(len(x), -1).contiguous() if residual is None else residual + bias
        return routes.product(x, weight, residual, dtype, swiglu=False)
    if few_rows.fits(x, weight):
        return few_rows.few_rows(x, weight, None if bias is None else bias.contiguous(), residual, dtype)
    return None


def _plain(x: Tensor, weight: Tensor | Weight | GroupedWeight, bias: Tensor | None) -> Tensor:
    if isinstance(weight, GroupedWeight):
        return grouped.linear(x, weight, bias)
    if isinstance(weight, Weight):
        return reference.linear_packed(x, weight, bias)
    if x.device.type == "cpu" and len(x) <= _FEW_ROWS:
        return reference.linear_few_rows(x, weight, bias)
    return reference.linear(x, weight, bias)
