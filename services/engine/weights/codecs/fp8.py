"""E4M3 with a scale a row or a block of 128 x 128: the largest magnitude becomes 448, the largest code.

No search: a floating-point code has the same relative error whatever the scale, up to subnormals.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.linear.quantized import FP8_BLOCK, Quantized
from services.engine.weights.codecs.scale import inverse, round_up

E4M3_MAX = 448.0
_CODE_BITS = 4
"""Significant bits of an e4m3 code."""


def encode_rows(values: Tensor) -> Quantized:
    scale = round_up(values.abs().amax(1) / E4M3_MAX, 24 - _CODE_BITS)
    return Quantized("fp8", e4m3(values * inverse(scale)[:, None]), row_scale=scale)


def encode_blocks(values: Tensor, scale_dtype: torch.dtype) -> Quantized:
    rows, columns = values.shape
    padded = pad(values, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.unflatten(0, (-1, FP8_BLOCK)).unflatten(2, (-1, FP8_BLOCK))
    scales = round_up(blocks.abs().amax((1, 3)) / E4M3_MAX, 24 - _CODE_BITS).to(scale_dtype)
    codes = e4m3(blocks * inverse(scales.float())[:, None, :, None])
    return Quantized("fp8-block", codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scales)


def e4m3(values: Tensor) -> Tensor:
    """Codes of float32 values, uint8: to nearest, ties to even, saturating. The sign of a zero is kept."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
