"""Scales that leave products exact."""

import torch
from torch import Tensor

_MANTISSA = 24
"""Significant bits of float32."""
_SMALLEST = 2.0**-126
"""Of the normal numbers."""


def round_up(values: Tensor, bits: int) -> Tensor:
    """Positive float32 to the next one of at most `bits` significant bits: times a code of 24 - `bits` it is exact."""
    rest = (1 << (_MANTISSA - bits)) - 1
    return ((values.view(torch.int32) + rest) & ~rest).view(torch.float32)


def inverse(scale: Tensor) -> Tensor:
    """1 / scale; 0 where the scale is 0 or no normal number: values that small become 0."""
    return torch.where(scale.abs() < _SMALLEST, 0.0, 1.0 / scale)
