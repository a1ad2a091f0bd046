"""Blocks of GGUF's quantized types, taken apart into codes and scales without loss.

    type                bits a weight: stored / as held here   held as
    Q8_0                8.5  / 8.5                              int8-g32
    NVFP4               4.5  / 4.5                              nvfp4
    Q4_0 Q5_0           4.5 5.5   / the same                    grouped
    Q4_1 Q5_1           5.0 6.0   / the same                    grouped with mins
    Q2_K Q4_K Q5_K      2.63 4.5 5.5 / 3.13 4.63 5.63           grouped with mins; sub-scales of 8 bits, not 4 or 6
    Q3_K Q6_K           3.44 6.56 / 3.56 6.56                   grouped
    IQ4_NL IQ4_XS       4.5  4.25 / 4.5 4.31                    grouped with a table
    MXFP4               4.25 / 4.5                              grouped with a table
    TQ1_0 TQ2_0         1.69 2.06 / 2.06                        grouped
    IQ1, IQ2, IQ3       see `gguf_grids`

Layouts: ggml-quants.c of llama.cpp, and the `gguf` package's `quants.py`, whose values these are, bit for bit.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from kernels.linear.grouped.form import Grouped, Layout
from kernels.linear.quantized import Quantized

Decoder: TypeAlias = Callable[[Tensor], Quantized | Grouped]
"""uint8 [rows, blocks, bytes of a block] -> the matrix."""

_SUPER = 256
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def half(data: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, [rows, blocks]."""
    return data[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def words16(data: Tensor) -> Tensor:
    """Bytes as unsigned 16-bit numbers, little-endian: int32 [..., n / 2]."""
    return data.contiguous().view(torch.int16).int() & 0xFFFF


def words32(data: Tensor) -> Tensor:
    """Bytes as unsigned 32-bit numbers, little-endian: int64 [..., n / 4]."""
    return data.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def fields(data: Tensor, bits: int, run: int) -> Tensor:
    """Runs of `run` bytes, each holding 8 / bits runs of codes one above the other, lowest bits first:
    [..., n] -> [..., 8 n / bits]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    pieces = (data.unflatten(-1, (-1, 1, run)) >> shifts) & (2**bits - 1)
    return pieces.flatten(-3)


def bits_of(data: Tensor) -> Tensor:
    """Each byte's 8 bits, lowest first: [..., n] -> [..., 8 n]."""
    return fields(data, 1, 1)


def signed(factors: Tensor) -> Tensor:
    return factors.flatten(1).to(torch.int8)


def _q4_0(data: Tensor) -> Grouped:
    return Grouped(Layout(4, 32, 32, zero=8), fields(data[..., 2:], 4, 16).flatten(1), half(data, 0))


def _q4_1(data: Tensor) -> Grouped:
    codes = fields(data[..., 4:], 4, 16).flatten(1)
    return Grouped(Layout(4, 32, 32), codes, half(data, 0), mins=-half(data, 2))


def _q5_0(data: Tensor) -> Grouped:
    codes = fields(data[..., 6:], 4, 16) | bits_of(data[..., 2:6]) << 4
    return Grouped(Layout(5, 32, 32, zero=16), codes.flatten(1), half(data, 0))


def _q5_1(data: Tensor) -> Grouped:
    codes = fields(data[..., 8:], 4, 16) | bits_of(data[..., 4:8]) << 4
    return Grouped(Layout(5, 32, 32), codes.flatten(1), half(data, 0), mins=-half(data, 2))


def _q8_0(data: Tensor) -> Quantized:
    return Quantized("int8-g32", data[..., 2:].flatten(1).view(torch.int8), half(data, 0))


def _q2_k(data: Tensor) -> Grouped:
    factors = data[..., :16]
    return Grouped(
        Layout(2, 16, _SUPER),
        fields(data[..., 16:80], 2, 32).flatten(1),
        half(data, 80),
        signed(factors & 15),
        half(data, 82),
        signed(factors >> 4),
    )


def _q3_k(data: Tensor) -> Grouped:
    codes = fields(data[..., 32:96], 2, 32) | fields(data[..., :32], 1, 32) << 2
    factors = fields(data[..., 96:104], 4, 8) | fields(data[..., 104:108], 2, 4) << 4
    return Grouped(
        Layout(3, 16, _SUPER, zero=4), codes.flatten(1), half(data, 108), signed(factors.to(torch.int16) - 32)
    )


def _six_bit(data: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight mins of 6 bits in 12 bytes: those of the last four lack 2 bits, which sit on top of the
    first four."""
    scales, mins, rest = data.unflatten(-1, (3, 4)).unbind(-2)
    return (
        torch.cat((scales & 63, (rest & 15) | (scales >> 2 & 48)), dim=-1),
        torch.cat((mins & 63, (rest >> 4) | (mins >> 2 & 48)), dim=-1),
    )


def _q4_k(data: Tensor) -> Grouped:
    scales, mins = _six_bit(data[..., 4:16])
    codes = fields(data[..., 16:], 4, 32).flatten(1)
    return Grouped(Layout(4, 32, _SUPER), codes, half(data, 0), signed(scales), half(data, 2), signed(mins))


def _q5_k(data: Tensor) -> Grouped:
    scales, mins = _six_bit(data[..., 4:16])
    codes = (fields(data[..., 48:], 4, 32) | fields(data[..., 16:48], 1, 32) << 4).flatten(1)
    return Grouped(Layout(5, 32, _SUPER), codes, half(data, 0), signed(scales), half(data, 2), signed(mins))


def _q6_k(data: Tensor) -> Grouped:
    codes = fields(data[..., :128], 4, 64) | fields(data[..., 128:192], 2, 32) << 4
    factors = data[..., 192:208].flatten(1).view(torch.int8)
    return Grouped(Layout(6, 16, _SUPER, zero=32), codes.flatten(1), half(data, 208), factors)


def _iq4_nl(data: Tensor) -> Grouped:
    return Grouped(Layout(4, 32, 32, table=_IQ4), fields(data[..., 2:], 4, 16).flatten(1), half(data, 0))


def _iq4_xs(data: Tensor) -> Grouped:
    high = words16(data[..., 2:4]) >> torch.arange(0, 16, 2) & 3
    factors = fields(data[..., 4:8], 4, 1) | high.to(torch.uint8) << 4
    codes = fields(data[..., 8:], 4, 16).flatten(1)
    return Grouped(Layout(4, 32, _SUPER, table=_IQ4), codes, half(data, 0), signed(factors.to(torch.int16) - 32))


def _mxfp4(data: Tensor) -> Grouped:
    """The shared exponent e means 2^(e - 127) times e2m1, here 2^(e - 128) times twice that."""
    exponent = data[..., 0].int()
    pattern = torch.where(exponent < 2, 0x20 << exponent.clamp(max=1), (exponent - 1) << 7)
    scales = pattern.to(torch.int16).view(torch.bfloat16)
    return Grouped(Layout(4, 32, 32, table=_E2M1_DOUBLED), fields(data[..., 1:], 4, 16).flatten(1), scales)


def _nvfp4(data: Tensor) -> Quantized:
    """Without the tensor's own scale. ggml reads a scale's bits without a sign, and 0x7F as 0."""
    scales = data[..., :4].flatten(1) & 0x7F
    scales = torch.where(scales == 0x7F, 0, scales).view(torch.float8_e4m3fn)
    codes = fields(data[..., 4:], 4, 8).flatten(1)
    return Quantized("nvfp4", codes, scales, torch.ones(len(data)))


def _tq1_0(data: Tensor) -> Grouped:
    """Five values in a byte, as the leading ternary digits of byte / 256."""

    def digits(part: Tensor, run: int, count: int) -> Tensor:
        powers = torch.tensor([1, 3, 9, 27, 81][:count], dtype=torch.uint8)[:, None]
        return (part.unflatten(-1, (-1, 1, run)) * powers).flatten(-3)  # modulo 256

    parts = (digits(data[..., :32], 32, 5), digits(data[..., 32:48], 16, 5), digits(data[..., 48:52], 4, 4))
    codes = (torch.cat(parts, dim=-1).to(torch.int16) * 3 >> 8).to(torch.uint8)
    return Grouped(Layout(2, _SUPER, _SUPER, zero=1), codes.flatten(1), half(data, 52))


def _tq2_0(data: Tensor) -> Grouped:
    return Grouped(Layout(2, _SUPER, _SUPER, zero=1), fields(data[..., :64], 2, 32).flatten(1), half(data, 64))


DECODERS: dict[Kind, Decoder] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q8_0: _q8_0,
    Kind.Q2_K: _q2_k,
    Kind.Q3_K: _q3_k,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
    Kind.IQ4_NL: _iq4_nl,
    Kind.IQ4_XS: _iq4_xs,
    Kind.MXFP4: _mxfp4,
    Kind.NVFP4: _nvfp4,
    Kind.TQ1_0: _tq1_0,
    Kind.TQ2_0: _tq2_0,
}
