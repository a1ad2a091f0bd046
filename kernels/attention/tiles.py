# pyrefly: ignore-errors
"""How the attention kernels read a tile of K or V, tokens [start, start + BN) of a page, whatever its row codec.

`plain_tile` and `described_tile` give numbers as they are, `coded_tile` decodes. Its columns are in another order than
the head's dims (`codes`): the queries are brought into that order once, the output out of it.
"""

import triton
import triton.language as tl

from kernels.attention.codes import e8x2_tile, e8x4_tile, fp8_tile, int4_tile, int8_tile, nvfp4_tile


@triton.jit
def plain_tile(
    pages_ptr, page, start, seen, head, page_stride, token_stride, head_stride, BN: tl.constexpr, D: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """[BN, D]. seen: bool [BN]; with MASKED the tokens that are not seen are zero, whatever lies there."""
    token = start + tl.arange(0, BN)
    place = token[:, None] * token_stride + tl.arange(0, D)[None, :]
    first = pages_ptr + page.to(tl.int64) * page_stride + head * head_stride
    return tl.load(first + place, mask=seen[:, None], other=0.0) if MASKED else tl.load(first + place)


@triton.jit
def described_tile(rows, page, start, seen, head, page_rows, BN: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr):
    """The same through a tensor descriptor of the pool as [rows, kv_heads * D], `page_rows` of them a page (a bulk
    copy on compute capability 9.0 and up, which takes no registers for addresses)."""
    tile = rows.load([page * page_rows + start, head * D])
    return tl.where(seen[:, None], tile, 0.0) if MASKED else tile


@triton.jit
def to_tile_order(x, CODEC: tl.constexpr):
    """[rows, D] in the order of the dims -> in that of a tile's columns."""
    if CODEC == "plain":
        return x
    else:
        WORD: tl.constexpr = 4 if CODEC == "fp8" or CODEC == "int8" else 16 if CODEC == "e8x2" else 8
        x = x.reshape(x.shape[0], x.shape[1] // WORD, 2, WORD // 2)
        return x.permute(0, 1, 3, 2).reshape(x.shape[0], x.shape[1] * x.shape[2] * x.shape[3])


@triton.jit
def from_tile_order(x, CODEC: tl.constexpr):
    """The inverse."""
    if CODEC == "plain":
        return x
    else:
        WORD: tl.constexpr = 4 if CODEC == "fp8" or CODEC == "int8" else 16 if CODEC == "e8x2" else 8
        x = x.reshape(x.shape[0], x.shape[1] // WORD, WORD // 2, 2)
        return x.permute(0, 1, 3, 2).reshape(x.shape[0], x.shape[1] * x.shape[2] * x.shape[3])


@triton.jit
def signs(rows, columns):
    """float32 [64, 64] of int32 [64] both: entries of Sylvester's Hadamard matrix (`kv_codec.rotate`), +-1."""
    bits = rows[:, None] & columns[None, :]
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    return 1.0 - 2.0 * (bits & 1).to(tl.float32)


@triton.jit
def tile_scales(
    scales_ptr, page, start, head, page_stride, CODEC: tl.constexpr, COUNT: tl.constexpr, PAGE: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """float32 [BN, COUNT]. page_stride in words; read as words, since copies that run ahead are of 4 bytes at least."""
    if CODEC == "nvfp4":
        w = tl.load(_place(scales_ptr, page, start, head, page_stride, COUNT, 1, PAGE) + tl.arange(0, BN * COUNT // 4))
        even, odd = tl.join(w & 0xFF, (w >> 16) & 0xFF), tl.join((w >> 8) & 0xFF, (w >> 24) & 0xFF)
        byte = tl.join(even, odd).reshape(BN, COUNT)
        normal = ((byte << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(byte < 8, byte.to(tl.float32) * 0.001953125, normal)
        return tl.where(byte == 0x7F, float("nan"), value)
    else:
        w = tl.load(_place(scales_ptr, page, start, head, page_stride, COUNT, 2, PAGE) + tl.arange(0, BN * COUNT // 2))
        bits = tl.join(w & 0xFFFF, (w >> 16) & 0xFFFF).reshape(BN, COUNT)
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def coded_tile(
    codes_ptr, scales, page, start, head, page_stride, CODEC: tl.constexpr, SCALED: tl.constexpr, HALF: tl.constexpr,
    ASM: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """[BN, D] of the product's dtype. scales: of `tile_scales`; the other arguments as in `codes`."""
    BYTES: tl.constexpr = D if CODEC == "fp8" or CODEC == "int8" else D // 4 if CODEC == "e8x2" else D // 2
    first = _place(codes_ptr, page, start, head, page_stride, BYTES, 1, PAGE)
    row = tl.arange(0, BN)[:, None] * (BYTES // 4)
    w = tl.load(first + row + tl.arange(0, BYTES // 4)[None, :])
    if CODEC == "fp8":
        return fp8_tile(w, scales, SCALED, HALF, ASM, BN, D)
    elif CODEC == "int8":
        return int8_tile(w, scales, SCALED, HALF, ASM, BN, D)
    elif CODEC == "int4":
        return int4_tile(w, scales, SCALED, HALF, ASM, BN, D)
    elif CODEC == "nvfp4":
        return nvfp4_tile(w, scales, SCALED, HALF, ASM, BN, D)
    elif CODEC == "e8x4":
        return e8x4_tile(w, scales, SCALED, HALF, ASM, BN, D)
    else:
        tl.static_assert(CODEC == "e8x2")
        return e8x2_tile(w, scales, SCALED, HALF, ASM, BN, D)


@triton.jit
def _place(
    start_ptr, page, start, head, page_stride, COUNT: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """Of the first word of a tile: a head's rows of a page are one piece, COUNT items of SIZE bytes each."""
    words = start_ptr.to(tl.pointer_type(tl.int32))
    return words + page.to(tl.int64) * page_stride + (head * PAGE + start) * (COUNT * SIZE) // 4
