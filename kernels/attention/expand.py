# pyrefly: ignore-errors
"""Coded pages -> plain ones, not rotated; `segments` starts it (docs/kv-formats.md says how codes lie).

Each number is code * scale in float32, rounded once to the type of the plain pages. Of rotated rows the codes, which
float16 has exactly, are turned back by a matrix product whose sums are exact too, and scaled behind it.
"""

import triton
import triton.language as tl

from kernels.attention.tiles import signs


@triton.jit(do_not_specialize=["table_stride", "begin", "tokens"])
def expand(
    keys, key_scales, values, value_scales, plain_keys, plain_values, count_ptr, context_ptr, table_ptr, page_stride,
    table_stride, begin, tokens,
    D: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, KEYS: tl.constexpr, KEY_DIMS: tl.constexpr,
    VALUES: tl.constexpr, VALUE_DIMS: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BN tokens, kv_heads, sequences): tokens [begin, begin + tokens) of each sequence, both multiples
    of PAGE, to rows [sequence * tokens, ...) of plain_keys and plain_values [rows, kv_heads, D]. keys and values:
    codes, with a float16 (nvfp4: E4M3) scale for each KEY_DIMS and VALUE_DIMS dims, [kv_heads, PAGE, count] of a page;
    page_stride is in 32-bit words. Tiles behind the sequence's end are left out, what is behind it in a tile is
    whatever the page has there."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    token = begin + tile * BN
    if (token >= tl.load(context_ptr + sequence)) | (tl.load(count_ptr + sequence) == 0):
        return
    page = tl.load(table_ptr + sequence.to(tl.int64) * table_stride + token // PAGE)
    row = sequence.to(tl.int64) * tokens + tile * BN
    place = (row + tl.arange(0, BN))[:, None] * (tl.num_programs(1) * D) + head * D + tl.arange(0, D)[None, :]
    first = page.to(tl.int64) * page_stride * 4  # bytes
    piece = head * PAGE + token % PAGE
    k = _decoded(keys, key_scales, first, piece, KEYS, KEY_DIMS, ROTATED, BN, D)
    tl.store(plain_keys + place, k.to(plain_keys.dtype.element_ty))
    v = _decoded(values, value_scales, first, piece, VALUES, VALUE_DIMS, ROTATED, BN, D)
    tl.store(plain_values + place, v.to(plain_values.dtype.element_ty))


@triton.jit
def _decoded(
    codes_ptr, scales_ptr, first, piece, CODEC: tl.constexpr, DIMS: tl.constexpr, ROTATED: tl.constexpr,
    BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """float32 [BN, D]. first: of the page, in bytes; piece: the first row of the page's field."""
    GROUPS: tl.constexpr = D // DIMS
    codes = codes_ptr.to(tl.pointer_type(tl.uint8)) + first
    numbers = _numbers(codes, piece, CODEC, BN, D).reshape(BN * GROUPS, DIMS)
    group = tl.arange(0, BN * GROUPS)
    if CODEC == "nvfp4":
        scales = scales_ptr.to(tl.pointer_type(tl.uint8)) + first
        scale = _e4m3(tl.load(scales + piece * GROUPS + group).to(tl.int32))
    else:
        scales = (scales_ptr.to(tl.pointer_type(tl.uint8)) + first).to(tl.pointer_type(tl.float16))
        scale = tl.load(scales + piece * GROUPS + group).to(tl.float32)
    if ROTATED:
        return _turned(numbers, scale, DIMS, BN, D)
    else:
        return (numbers * scale[:, None]).reshape(BN, D)


@triton.jit
def _turned(numbers, scale, DIMS: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    """The rotation of numbers [BN * D / DIMS, DIMS], each row of which has a scale: [BN, D]."""
    tl.static_assert(DIMS == 64 or DIMS == 32)
    dim = tl.arange(0, DIMS)
    sums = tl.dot(numbers.to(tl.float16), signs(dim, dim).to(tl.float16), tl.zeros(numbers.shape, tl.float32))
    sums *= scale[:, None]
    if DIMS == 32:  # two rows share a rotation
        former, latter = tl.split(sums.reshape(BN * D // 64, 2, 32).permute(0, 2, 1))
        sums = tl.join(former + latter, former - latter).permute(0, 2, 1)
    return sums.reshape(BN, D) / 8


@triton.jit
def _numbers(codes_ptr, piece, CODEC: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    """float32 [BN, D]: what the codes stand for, in units of their scales. But E4M3's NaN, which no encoder writes, is
    read as 480."""
    token = piece + tl.arange(0, BN)[:, None]
    if CODEC == "int8":
        codes = codes_ptr.to(tl.pointer_type(tl.int8))
        return tl.load(codes + token * D + tl.arange(0, D)[None, :]).to(tl.float32)
    else:
        FIELDS: tl.constexpr = 4 if CODEC == "fp8" else 8
        words = codes_ptr.to(tl.pointer_type(tl.int16 if CODEC == "e8x2" else tl.int32))
        w = tl.load(words + token * (D // FIELDS) + tl.arange(0, D // FIELDS)[None, :]).to(tl.int32)
        if CODEC == "fp8":  # exponent and mantissa to where float32 has them, also of subnormals
            numbers = ((_tops(w, 8, 4) >> 4) & ~0x780FFFFF).to(tl.float32, bitcast=True) * 2.0**120
        elif CODEC == "nvfp4":
            numbers = ((_tops(w, 4, 8) >> 6) & ~0x7E3FFFFF).to(tl.float32, bitcast=True) * 2.0**126
        elif CODEC == "int4":
            numbers = (_tops(w, 4, 8) >> 28).to(tl.float32)
        else:
            tl.static_assert(CODEC == "e8x4" or CODEC == "e8x2")
            numbers = _points(w, 4 if CODEC == "e8x4" else 2)
        return numbers.reshape(BN, D)


@triton.jit
def _points(w, BITS: tl.constexpr):
    """w int32 [A, B], a point of E8 in the 8 * BITS low bits of each -> float32 [A, B, 8]."""
    LAST: tl.constexpr = 7 * BITS
    parity = w & (0x01111111 if BITS == 4 else 0x1555)
    parity ^= parity >> (4 * BITS)
    parity ^= parity >> (2 * BITS)
    parity ^= parity >> BITS
    coset = ((w >> LAST) & 1).to(tl.float32) * 0.5 + 0.25
    w = (w & ~(1 << LAST)) | ((parity & 1) << LAST)
    return (_tops(w, BITS, 8) >> (32 - BITS)).to(tl.float32) + coset[:, :, None]


@triton.jit
def _tops(w, BITS: tl.constexpr, COUNT: tl.constexpr):
    """int32 [A, B] -> [A, B, COUNT]: the fields of BITS bits, from the lowest on, each moved to the highest bits, with
    the lower ones behind it. Joined, not spread over a vector of shifts: so a word stays in the lane that has it."""
    if COUNT == 4:
        even = tl.join(_top(w, 0, BITS), _top(w, 2, BITS))
        odd = tl.join(_top(w, 1, BITS), _top(w, 3, BITS))
    else:
        even = tl.join(tl.join(_top(w, 0, BITS), _top(w, 4, BITS)), tl.join(_top(w, 2, BITS), _top(w, 6, BITS)))
        odd = tl.join(tl.join(_top(w, 1, BITS), _top(w, 5, BITS)), tl.join(_top(w, 3, BITS), _top(w, 7, BITS)))
    return tl.join(even, odd).reshape(w.shape[0], w.shape[1], COUNT)


@triton.jit
def _top(w, FIELD: tl.constexpr, BITS: tl.constexpr):
    return w << (32 - BITS - FIELD * BITS)


@triton.jit
def _e4m3(byte):
    """float32 of the E4M3 in the low bits of an int32."""
    size = byte & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    value = tl.where(size == 0x7F, float("nan"), value)
    return tl.where(byte < 128, value, -value)
