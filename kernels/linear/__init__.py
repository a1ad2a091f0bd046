"""Matrix products with weights."""

from torch import Tensor

from kernels.linear import reference

_FEW_ROWS = 32
"""Up to here the transposed product is faster on a CPU. 30 matrices of [3072, 576], float32, MKL on 2 cores of an EPYC,
ms plain / transposed: 1 row 19.5 / 10.7, 2 rows 38 / 10.4, 8 rows 25 / 17, 32 rows 49 / 35."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, contiguous. x [T, inputs], weight [outputs, inputs], bias [outputs], all of one float dtype."""
    if x.device.type == "cpu" and len(x) <= _FEW_ROWS:
        return reference.linear_few_rows(x, weight, bias)
    return reference.linear(x, weight, bias)
