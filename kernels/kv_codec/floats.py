"""Rows as small floats: E4M3 with a scale a row, and NVFP4."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels.kv_codec.rows import scaled

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """One scale a row = fp16(max|x| * f32(1/448)); code = e4m3(x / scale), kept as its byte. encode(decode(...))
    gives the same codes and scales back (for scales that are normal float16 numbers)."""

    @property
    def multiple(self) -> int:
        return 1

    @property
    def code_dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float16

    def code_count(self, dim: int) -> int:
        return dim

    def scale_count(self, dim: int) -> int:
        return 1

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        groups = rows.float()[..., None, :]
        scales = (groups.abs().amax(-1) * (1 / _E4M3_MAX)).half()
        codes = scaled(groups, scales).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8).flatten(-2), scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.view(torch.float8_e4m3fn).float() * scales.float()


@dataclass(frozen=True, slots=True)
class Nvfp4Rows:
    """E2M1 codes with an E4M3 scale for each 16 dims and none above it: scale = e4m3(max|x| * f32(1/6)), within [2^-9,
    448]; code = e2m1(x / scale), ties to the even code, magnitudes above 6 to 6, no negative zero. Two codes a byte,
    the even dim in the low nibble. Finite magnitudes above 2688 come back as 2688. encode(decode(...)) is not the
    identity where no code of a group reaches 6."""

    @property
    def multiple(self) -> int:
        return 16

    @property
    def code_dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.uint8

    def code_count(self, dim: int) -> int:
        return dim // 2

    def scale_count(self, dim: int) -> int:
        return dim // 16

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        groups = rows.float().unflatten(-1, (-1, 16))
        wanted = groups.abs().amax(-1) * (1 / _E2M1_MAX)
        wanted = torch.where(wanted.isfinite(), wanted.clamp(2.0**-9, _E4M3_MAX), torch.nan)
        scales = wanted.to(torch.float8_e4m3fn)
        low, high = _e2m1(scaled(groups, scales)).flatten(-2).unflatten(-1, (-1, 2)).unbind(-1)
        return low | (high << 4), scales.view(torch.uint8)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
        values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=codes.device)[nibbles.int()]
        wide = scales.view(torch.float8_e4m3fn).float()
        return (values.unflatten(-1, (-1, 16)) * wide[..., None]).flatten(-2)


def _e2m1(x: Tensor) -> Tensor:
    """The nearest code, uint8: sign in bit 3."""
    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for number, (smaller, larger) in enumerate(pairwise(_E2M1)):
        middle = (smaller + larger) / 2
        # A tie goes up only to a code that is even.
        code += size >= middle if number % 2 else size > middle
    return torch.where((x < 0) & (code > 0), code + 8, code)
