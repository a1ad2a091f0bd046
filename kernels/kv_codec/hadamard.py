"""The rotation of the formats whose names begin with "r"."""

import torch
from torch import Tensor

GROUP = 64
"""Dims that are rotated together: those that share a scale. One transform of the whole head is no more exact and takes
more steps (docs/kv-formats.md)."""


def rotate(x: Tensor) -> Tensor:
    """Multiply each group of 64 dims by the Hadamard matrix of Sylvester's construction over 8, which is orthogonal
    and its own inverse: an outlier channel becomes 64 values of the same size. Rotated queries score rotated keys as
    before, and attention over rotated values gives the rotated output.

    x [..., D], D a multiple of 64, any float dtype, which the result has too. In float32: butterflies of distance 1, 2,
    ..., 32, then the division, which is exact.
    """
    wide = x.float()
    distance = 1
    while distance < GROUP:
        first, second = wide.unflatten(-1, (-1, 2, distance)).unbind(-2)
        wide = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        distance *= 2
    return (wide / GROUP**0.5).to(x.dtype)
