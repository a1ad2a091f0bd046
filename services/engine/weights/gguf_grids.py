"""Blocks of GGUF's types with a grid: 8 or 4 weights are one entry of a list of points, most with signs beside.

The kernels want one code a weight, so the point is written out, which takes more memory than the file and no accuracy:

    type                        bits a weight: stored / as held here   held as
    IQ1_S IQ1_M                 1.56 1.75 / 2.69 3.63                   2 bits and a min of +-1/8; 3 bits with a table
    IQ2_XXS IQ2_XS IQ2_S        2.06 2.31 2.56 / 3.38 3.63 3.63         3 bits with a table: 3 sizes and a sign
    IQ3_XXS IQ3_S               3.06 3.44 / 4.38 4.31                   4 bits with a table: 8 sizes and a sign

Where the values have a factor of 1/4 or 1/8, it goes into the scale, kept in float32: float16 would round small ones.
The points are the `gguf` package's.
"""

from functools import cache

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from kernels.linear.grouped.form import Grouped, Layout
from services.engine.weights.gguf_blocks import Decoder, bits_of, fields, half, signed, words16, words32

_SUPER = 256
_SIZES_2 = (8, 25, 43)
_SIZES_3_XXS = (4, 12, 20, 28, 36, 44, 52, 62)
_SIZES_3_S = (1, 3, 5, 7, 9, 11, 13, 15)
_TERNARY = (-1, 0, 1)
_QUARTER_NIBBLES = torch.arange(0, 12, 3, dtype=torch.int32)
"""Shifts of four 3-bit fields."""


@cache
def _points(kind: type[quants.IQ2_XXS] | type[quants.IQ1_S], sizes: tuple[int, ...]) -> Tensor:
    """The grid as places in `sizes`, uint8 [points, weights]."""
    kind.init_grid()
    assert kind.grid is not None
    return torch.from_numpy(np.searchsorted(sizes, kind.grid[0, 0]).astype(np.uint8))


def _table(sizes: tuple[int, ...], half_size: int) -> tuple[int, ...]:
    """Of codes whose top bit is the sign."""
    padded = sizes + (0,) * (half_size - len(sizes))
    return padded + tuple(-size for size in padded)


_TABLE_2 = _table(_SIZES_2, 4)
_TABLE_3_XXS = _table(_SIZES_3_XXS, 8)
_TABLE_3_S = _table(_SIZES_3_S, 8)
_TABLE_1_M = (-7, 1, 9, 0, -9, -1, 7, 0)
"""8 g + 1, then 8 g - 1, for g = -1, 0, 1."""


@cache
def _signs() -> Tensor:
    """Of 7 bits: their signs and an eighth that makes the number of minuses even, uint8 [128, 8]."""
    seven = torch.arange(128)[:, None] >> torch.arange(7) & 1
    return torch.cat((seven, seven.sum(-1, keepdim=True) & 1), dim=-1).to(torch.uint8)


def _seven_signs(index: Tensor) -> Tensor:
    """[..., n] -> uint8 [..., 8 n]."""
    return _signs()[index.long()].flatten(-2)


def _odd(nibbles: Tensor) -> Tensor:
    return signed(2 * nibbles + 1)


def _iq2_xxs(data: Tensor) -> Grouped:
    pairs = data[..., 2:].unflatten(-1, (8, 8))
    rest = words32(pairs[..., 4:])[..., 0]  # [rows, blocks, 8]
    sizes = _points(quants.IQ2_XXS, _SIZES_2)[pairs[..., :4].long()].flatten(2)
    signs = _seven_signs((rest[..., None] >> torch.arange(0, 28, 7) & 127).flatten(2))
    layout = Layout(3, 32, _SUPER, table=_TABLE_2)
    return Grouped(layout, (sizes | signs << 2).flatten(1), half(data, 0).float() / 8, _odd(rest >> 28))


def _iq2_xs(data: Tensor) -> Grouped:
    points = words16(data[..., 2:66])
    sizes = _points(quants.IQ2_XS, _SIZES_2)[(points & 511).long()].flatten(2)
    codes = sizes | _seven_signs(points >> 9) << 2
    layout = Layout(3, 16, _SUPER, table=_TABLE_2)
    return Grouped(layout, codes.flatten(1), half(data, 0).float() / 8, _odd(fields(data[..., 66:], 4, 1)))


def _iq2_s(data: Tensor) -> Grouped:
    points = data[..., 2:34].long() | fields(data[..., 66:74], 2, 1).long() << 8
    codes = _points(quants.IQ2_S, _SIZES_2)[points].flatten(2) | bits_of(data[..., 34:66]) << 2
    layout = Layout(3, 16, _SUPER, table=_TABLE_2)
    return Grouped(layout, codes.flatten(1), half(data, 0).float() / 8, _odd(fields(data[..., 74:], 4, 1)))


def _iq3_xxs(data: Tensor) -> Grouped:
    rest = words32(data[..., 66:])
    sizes = _points(quants.IQ3_XXS, _SIZES_3_XXS)[data[..., 2:66].long()].flatten(2)
    signs = _seven_signs((rest[..., None] >> torch.arange(0, 28, 7) & 127).flatten(2))
    layout = Layout(4, 32, _SUPER, table=_TABLE_3_XXS)
    return Grouped(layout, (sizes | signs << 3).flatten(1), half(data, 0).float() / 4, _odd(rest >> 28))


def _iq3_s(data: Tensor) -> Grouped:
    points = data[..., 2:66].long() | bits_of(data[..., 66:74]).long() << 8
    codes = _points(quants.IQ3_S, _SIZES_3_S)[points].flatten(2) | bits_of(data[..., 74:106]) << 3
    layout = Layout(4, 32, _SUPER, table=_TABLE_3_S)
    return Grouped(layout, codes.flatten(1), half(data, 0), _odd(fields(data[..., 106:], 4, 1)))


def _iq1_s(data: Tensor) -> Grouped:
    """d (2 s + 1) (g +- 1/8)."""
    rest = words16(data[..., 34:])  # [rows, blocks, 8]
    points = data[..., 2:34].long() | ((rest[..., None] >> _QUARTER_NIBBLES & 7).flatten(2).long() << 8)
    codes = _points(quants.IQ1_S, _TERNARY)[points].flatten(1)
    scales = 2 * (rest >> 12 & 7) + 1
    mins = torch.where(rest >> 15 == 1, scales, -scales)
    d = half(data, 0)
    return Grouped(Layout(2, 32, _SUPER, zero=1), codes, d, signed(scales), d.float() / 8, signed(mins))


def _iq1_m(data: Tensor) -> Grouped:
    """d (2 s + 1) (8 g +- 1) / 8; the sign for 8 weights, s for 16, d in the top bits of four words."""
    four = words16(data[..., 48:])
    bits = (four >> 12 << torch.arange(0, 16, 4, dtype=torch.int32)).sum(-1)
    d = torch.where(bits >= 2**15, bits - 2**16, bits).to(torch.int16).view(torch.float16)
    nibbles = fields(data[..., 32:48], 4, 1)
    points = data[..., :32].long() | (nibbles & 7).long() << 8
    codes = _points(quants.IQ1_M, _TERNARY)[points] | (nibbles >> 3 << 2)[..., None]
    scales = 2 * (four[..., None] >> _QUARTER_NIBBLES & 7).flatten(2) + 1
    return Grouped(Layout(3, 16, _SUPER, table=_TABLE_1_M), codes.flatten(1), d.float() / 8, signed(scales))


DECODERS: dict[Kind, Decoder] = {
    Kind.IQ2_XXS: _iq2_xxs,
    Kind.IQ2_XS: _iq2_xs,
    Kind.IQ2_S: _iq2_s,
    Kind.IQ3_XXS: _iq3_xxs,
    Kind.IQ3_S: _iq3_s,
    Kind.IQ1_S: _iq1_s,
    Kind.IQ1_M: _iq1_m,
}
