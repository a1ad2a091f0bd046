# pyrefly: ignore-errors
"""How the attention kernels read a tile of plain K or V, tokens [start, start + BN) of a page; and the rotation."""

import triton
import triton.language as tl


@triton.jit
def plain_tile(
    pages, page, start, seen, head, page_stride, token_stride, head_stride, BN: tl.constexpr, D: tl.constexpr,
    TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """[BN, D]. seen: bool [BN]; with MASKED the tokens that are not seen are zero, whatever lies there.

    With TMA through a tensor descriptor of the pool as [rows, kv_heads * D], `page_stride` of them a page (a bulk copy
    on compute capability 9.0 and up, which takes no registers for addresses); the other strides are not used then."""
    if TMA:
        rows = pages.load([page * page_stride + start, head * D])
        return tl.where(seen[:, None], rows, 0.0) if MASKED else rows
    else:
        token = start + tl.arange(0, BN)
        place = token[:, None] * token_stride + tl.arange(0, D)[None, :]
        first = pages + page.to(tl.int64) * page_stride + head * head_stride
        return tl.load(first + place, mask=seen[:, None], other=0.0) if MASKED else tl.load(first + place)


@triton.jit
def signs(rows, columns):
    """float32 [64, 64] of int32 [64] both: entries of Sylvester's Hadamard matrix (`kv_codec.rotate`), +-1."""
    bits = rows[:, None] & columns[None, :]
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    return 1.0 - 2.0 * (bits & 1).to(tl.float32)
