"""How codes lie in memory for the kernels.

fp8 and fp8-block: uint8 [N, K] with K padded to a multiple of 128, rows as cuBLAS reads them; scales as they are.

The others: 32-bit words in planes, int32 [units, planes, N, 8]. A plane holds 8 words of every row: 64 columns of 4
bits, 128 of 2 bits, 256 of 1 bit or of the three planes of int3. A unit is the least number of columns that fills whole
planes and an even number of groups; columns are padded to whole units. Some rows of one plane are one run of memory.

Within a plane, a shift and a mask of a word find the codes of two neighbouring columns, one in each half of the word.
In half bfloat16 a "pair": that is how a matrix instruction wants its operand, so nothing is moved between registers.
Pair p of 16 columns has column 16 p + 2 j in the lower and 16 p + 2 j + 1 in the upper half of word j.

    plane        where the code of pair p lies in a half
    4 bits       bits 4 p to 4 p + 3, p < 4
    2 bits       bits 2 p and 2 p + 1, p < 8
    1 bit        bit p, p < 16
    int3         pairs 0-4 in the first plane, 5-9 in the second, 10-14 in the third; p % 5 = 0: bits 6-4, 1: 3-1,
                 2: 12-10, 3: 9-7, 4: 15-13, so that one shift serves two; pair 15: bit 0 of the three planes, the
                 lowest bit in the first
    nvfp4        the sign, then the three others, p = 0: 15 and 8-6; p = 1: 11 and 4-2; p = 2: 5 and, in the other
                 half, 14-12; p = 3: 1, in the other half 10 and 9, and 0. So one mask finds the first three, behind
                 no shift, one by 4 and a rotation by 10; a rotation by 14 and a shift by 6 find the fourth

Integer codes are stored with the offset 2^(bits - 1). int5 = 4 bits + 1 bit, int6 = 4 + 2, int8 = lower + higher 4.
Scales: integers 16 bits [groups / 2, N, 2], so that a word has two; nvfp4 int32 [units, N], a byte for each of four
groups (`_scale_bytes`).
fp8: within 128 columns, byte 0 and 2 of word j are columns 2 j and 2 j + 1, byte 1 and 3 are 64 + 2 j and 65 + 2 j.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.linear.quantized import FORMATS, Quantized

FP8 = ("fp8", "fp8-block")
WORDS = 8
"""Of a row in a plane."""
_PAIR = 2 * WORDS
_PLANES = {
    "int8-g32": ((4, 0), (4, 4)),
    "int6-g64": ((4, 0), (2, 4)),
    "int5-g64": ((4, 0), (1, 4)),
    "int4-g64": ((4, 0),),
}
"""(bits, position of the lowest) of the planes that make up a code."""
_NVFP4_BITS = ((15, 8, 7, 6), (11, 4, 3, 2), (5, 30, 29, 28), (1, 26, 25, 0))
"""Where bits 3, 2, 1 and 0 of the nibble of each pair lie in a half; from 16 on in the other half."""
_INT3_LOWEST = (4, 1, 10, 7, 13)
_UNITS = {"int8-g32": 64, "int6-g64": 128, "int5-g64": 256, "int4-g64": 128, "int3-g128": 256, "nvfp4": 64}
_FP8_BLOCK = 128
_SCALE_SHIFT = 6
"""What a normal e4m3 scale's exponent grows by in `_scale_bytes`."""


def unit_columns(format: str) -> int:
    """Columns are padded to a multiple of this."""
    return _FP8_BLOCK if format in FP8 else _UNITS[format]


def row_dim(format: str, codes: bool) -> int:
    """The dim of codes, or of scales, in which a matrix's rows lie."""
    if format in FP8:
        return 0
    return 2 if codes else 1


def pack(quantized: Quantized) -> tuple[Tensor, Tensor | None]:
    """-> codes, scales. Where a scale of nvfp4 is zero the codes become zero too: the kernels know no zero scale."""
    format, codes = quantized.format, quantized.codes
    if format in FP8:
        return _permute_fp8(_padded(codes, _FP8_BLOCK), inverse=False), quantized.scales
    if format == "nvfp4":
        assert quantized.scales is not None
        scales = quantized.scales.view(torch.uint8)
        zero = (scales == 0).repeat_interleave(FORMATS[format].group, dim=1)[:, : codes.shape[1]]
        codes = _padded(codes.masked_fill(zero, 0), _UNITS[format])
        words = _word_planes(codes, [[(place, 3 - bit) for bit, place in enumerate(pair)] for pair in _NVFP4_BITS])
        return words[:, None].contiguous(), _scale_bytes(_padded(scales, 4))
    assert quantized.scales is not None
    offset = 1 << (FORMATS[format].bits - 1)
    unsigned = _padded((codes.int() + offset).to(torch.uint8), _UNITS[format], offset)
    if format == "int3-g128":
        planes = _int3_planes(unsigned)
    else:
        planes = torch.cat([_bit_planes(unsigned, bits, low, _UNITS[format]) for bits, low in _PLANES[format]], dim=1)
    groups = planes.shape[0] * (_UNITS[format] // FORMATS[format].group)
    scales = pad(quantized.scales, (0, groups - quantized.scales.shape[1]))
    return planes.contiguous(), scales.unflatten(1, (-1, 2)).transpose(0, 1).contiguous()


def unpack(format: str, codes: Tensor, scales: Tensor | None, rows: int, columns: int) -> tuple[Tensor, Tensor | None]:
    """The inverse."""
    if format in FP8:
        return _permute_fp8(codes, inverse=True)[:, :columns].contiguous(), scales
    assert scales is not None
    if format == "nvfp4":
        places = [[(place, 3 - bit) for bit, place in enumerate(pair)] for pair in _NVFP4_BITS]
        groups = -(-columns // FORMATS[format].group)
        nibbles = _from_word_planes(codes[:, 0], places, rows)[:, :columns].contiguous()
        return nibbles, _scales_of_bytes(scales)[:, :groups].contiguous().view(torch.float8_e4m3fn)
    if format == "int3-g128":
        unsigned = _from_int3_planes(codes, rows)
    else:
        unsigned = torch.zeros(rows, codes.shape[0] * _UNITS[format], dtype=torch.uint8, device=codes.device)
        first = 0
        for bits, low in _PLANES[format]:
            count = _UNITS[format] * bits // (32 * WORDS)
            unsigned |= _from_bit_planes(codes[:, first : first + count], bits, rows) << low
            first += count
    offset = 1 << (FORMATS[format].bits - 1)
    groups = -(-columns // FORMATS[format].group)
    natural = scales.transpose(0, 1).flatten(1)[:, :groups].contiguous()
    return (unsigned.int() - offset)[:, :columns].to(torch.int8).contiguous(), natural


def _padded(values: Tensor, multiple: int, fill: int = 0) -> Tensor:
    missing = -values.shape[1] % multiple
    return pad(values, (0, missing), value=fill) if missing else values


def _permute_fp8(codes: Tensor, inverse: bool) -> Tensor:
    """[N, K]: columns (half, word, side) of each 128 to bytes (word, side, half) or back."""
    if inverse:
        return codes.unflatten(1, (-1, _FP8_BLOCK // 4, 2, 2)).permute(0, 1, 4, 2, 3).reshape(codes.shape)
    return codes.unflatten(1, (-1, 2, _FP8_BLOCK // 4, 2)).permute(0, 1, 3, 4, 2).reshape(codes.shape)


Places = list[list[tuple[int, int]]]
"""For each pair of a plane: (position in the half or, 16 more, in the other one, position in the code) of each of its
bits."""


def _word_planes(codes: Tensor, places: Places) -> Tensor:
    """uint8 [N, K] of codes -> int32 [K / columns of a plane, N, 8]."""
    pairs = codes.unflatten(1, (-1, len(places), WORDS, 2)).long()  # [N, planes, pair, word, side]
    words = torch.zeros(pairs.shape[0], pairs.shape[1], WORDS, dtype=torch.int64, device=codes.device)
    for pair, bits in enumerate(places):
        for place, bit in bits:
            for side in range(2):
                words |= ((pairs[:, :, pair, :, side] >> bit) & 1) << ((place + 16 * side) % 32)
    return _signed(words).transpose(0, 1)


def _from_word_planes(words: Tensor, places: Places, rows: int) -> Tensor:
    """The inverse, uint8 [N, K]."""
    values = words.long().transpose(0, 1)  # [N, planes, word]
    shape = (rows, values.shape[1], len(places), WORDS, 2)
    pairs = torch.zeros(shape, dtype=torch.uint8, device=words.device)
    for pair, bits in enumerate(places):
        for place, bit in bits:
            for side in range(2):
                pairs[:, :, pair, :, side] |= (((values >> ((place + 16 * side) % 32)) & 1) << bit).to(torch.uint8)
    return pairs.reshape(rows, -1)


def _plain_places(bits: int) -> Places:
    return [[(bits * pair + bit, bit) for bit in range(bits)] for pair in range(16 // bits)]


def _bit_planes(unsigned: Tensor, bits: int, low: int, unit: int) -> Tensor:
    """Bits [low, low + bits) of codes, int32 [units, planes, N, 8]."""
    planes = _word_planes((unsigned >> low) & ((1 << bits) - 1), _plain_places(bits))
    return planes.unflatten(0, (-1, unit * bits // (32 * WORDS)))


def _from_bit_planes(planes: Tensor, bits: int, rows: int) -> Tensor:
    return _from_word_planes(planes.flatten(0, 1), _plain_places(bits), rows)


def _int3_places(plane: int) -> Places:
    """Of the 16 pairs, those bits that lie in this plane."""
    places: Places = [[] for _ in range(16)]
    for pair in range(5 * plane, 5 * plane + 5):
        places[pair] = [(_INT3_LOWEST[pair % 5] + bit, bit) for bit in range(3)]
    places[15] = [(0, plane)]
    return places


def _int3_planes(unsigned: Tensor) -> Tensor:
    return torch.stack([_word_planes(unsigned, _int3_places(plane)) for plane in range(3)], dim=1)


def _from_int3_planes(planes: Tensor, rows: int) -> Tensor:
    parts = [_from_word_planes(planes[:, plane], _int3_places(plane), rows) for plane in range(3)]
    return parts[0] | parts[1] | parts[2]


def _scale_bytes(scales: Tensor) -> Tensor:
    """e4m3 bits uint8 [N, groups] -> int32 [groups / 4, N].

    A byte has 5 bits of exponent and 3 of mantissa, always with the leading one: value = 2^(E - 13) (1 + m / 8), which
    the subnormals of e4m3 fit too. Its nibbles are swapped: the lower one then goes into the higher byte of a bfloat16,
    the upper one into the lower byte.
    """
    exponent, mantissa = scales.int() >> 3, scales.int() & 7
    top = torch.where(mantissa >= 4, 2, torch.where(mantissa >= 2, 1, 0))  # of a subnormal: its leading bit
    subnormal = ((_SCALE_SHIFT - 2 + top) << 3) | ((mantissa << (3 - top)) & 7)
    byte = torch.where(exponent > 0, ((exponent + _SCALE_SHIFT) << 3) | mantissa, subnormal)
    byte = _swapped(torch.where(scales == 0, 0, byte)).long().unflatten(1, (-1, 4))
    return _signed((byte << torch.arange(0, 32, 8, device=scales.device)).sum(-1)).t().contiguous()


def _scales_of_bytes(words: Tensor) -> Tensor:
    """The inverse, uint8 [N, groups]."""
    shifts = torch.arange(0, 32, 8, device=words.device)
    byte = _swapped(((words.t().long()[..., None] >> shifts) & 0xFF).flatten(1))
    exponent, mantissa = byte >> 3, byte & 7
    top = (exponent - (_SCALE_SHIFT - 2)).clamp(0, 2)
    subnormal = (8 | mantissa) >> (3 - top)
    bits = torch.where(exponent > _SCALE_SHIFT, ((exponent - _SCALE_SHIFT) << 3) | mantissa, subnormal)
    return torch.where(byte == 0, 0, bits).to(torch.uint8)


def _swapped(byte: Tensor) -> Tensor:
    return ((byte & 15) << 4) | (byte >> 4)


def _signed(words: Tensor) -> Tensor:
    """int64 of 32 bits -> int32 of the same bits."""
    return torch.where(words >= 2**31, words - 2**32, words).int()
