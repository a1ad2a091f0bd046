"""A tensor as the vectors along its last dim, for kernels that take some whole vectors a program."""

from dataclasses import dataclass

from torch import Tensor

_FEW = 1 << 20
"""Elements up to which a GPU is not full, and short programs end sooner."""
_LONG = 2048


@dataclass(frozen=True, slots=True)
class Vectors:
    """Vector n begins n // heads * token_stride + n % heads * head_stride elements behind `tensor`'s first, and its
    elements follow each other."""

    tensor: Tensor
    """A copy, where the one that was given has its vectors in no such order."""
    count: int
    heads: int
    size: int
    token_stride: int
    head_stride: int


def vectors(x: Tensor) -> Vectors:
    """x [N], [T, N], [T, H, N] with any strides but the last, or [..., N]."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        x = x.contiguous()
    if x.dim() == 3:
        tokens, heads, size = x.shape
        return Vectors(x, tokens * heads, heads, size, x.stride(0), x.stride(1))
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return Vectors(x, len(x), 1, x.shape[1], x.stride(0), 0)


@dataclass(frozen=True, slots=True)
class VectorLaunch:
    count: int
    """Of vectors, a program: a power of two."""
    wide: int
    """The power of two that a vector fits in."""
    warps: int


def vector_launch(count: int, size: int) -> VectorLaunch:
    """count vectors of so many elements. Several short ones a program: with few, a warp each of 128 elements, so that
    none waits for a sum of another warp's."""
    wide = 1 << max(size - 1, 15).bit_length()
    few = count * wide <= _FEW
    if wide >= _LONG:
        return VectorLaunch(1, wide, min(max(wide // (512 if few else 1024), 4), 16))
    return VectorLaunch(max(1, (512 if few else 2048) // wide), wide, 4)
