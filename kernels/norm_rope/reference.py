"""Plain torch, any device: the oracle."""

import torch
from torch import Tensor
from torch.nn.functional import silu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rms_norm_centred(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1.0 + weight.float())).to(dtype)


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (wide * silu(gate.float())).to(dtype)


def rotary_angles(positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.float()[:, None] * inverse_frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turning = 2 * cos.shape[-1]
    first, second = x[..., :turning].float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return turned if turning == x.shape[-1] else torch.cat((turned, x[..., turning:]), dim=-1)
