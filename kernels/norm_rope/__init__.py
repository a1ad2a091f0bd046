"""RMS norm and rotary position embedding.

T: tokens of a step. H: heads. D: dims of a head. `x` has any float dtype, keeps it where no other `dtype` is asked for,
and is computed in float32. On a GPU norms and angles are one launch each.
"""

import torch
from torch import Tensor

from kernels.norm_rope import reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich 2019). x [..., N], weight [N]. Rounded
    to x's dtype before the weight; with a wider weight the result is as wide."""
    if x.is_cuda:
        from kernels.norm_rope import launches  # triton exists on Linux only

        return launches.norm("plain", x, None, weight, eps, torch.promote_types(x.dtype, weight.dtype))
    return reference.rms_norm(x, weight, eps)


def rms_norm_centred(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """As `rms_norm` with the weight 1 + `weight`, and one rounding at the end."""
    if x.is_cuda:
        from kernels.norm_rope import launches  # triton exists on Linux only

        return launches.norm("centred", x, None, weight, eps, dtype or x.dtype)
    return reference.rms_norm_centred(x, weight, eps, dtype or x.dtype)


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """rms_norm(x, weight) * silu(gate), rounded at the end. x, gate [..., N], weight [N], each of its own dtype."""
    if x.is_cuda:
        from kernels.norm_rope import launches  # triton exists on Linux only

        return launches.norm("gated", x, gate, weight, eps, dtype or x.dtype)
    return reference.rms_norm_gated(x, gate, weight, eps, dtype or x.dtype)


def rotary_angles(positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [T, R/2], of `positions` int [T] times `inverse_frequencies` float32 [R/2] (radians)."""
    if positions.is_cuda:
        from kernels.norm_rope import launches  # triton exists on Linux only

        return launches.rotary_angles(positions, inverse_frequencies)
    return reference.rotary_angles(positions, inverse_frequencies)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + R/2) of every head by the token's angles (Su et al. 2021, in GPT-NeoX's pairing).

    x [T, H, D]; cos, sin float32 [T, R/2] as of `rotary_angles`, R <= D: the dims from R on stay as they are. Returns
    a new tensor like x.
    """
    return reference.rotate(x, cos, sin)
