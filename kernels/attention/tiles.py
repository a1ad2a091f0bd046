# pyrefly: ignore-errors
"""How the attention kernels read a tile of K or V, tokens [start, start + BN) of a page: one function a format.

Each gives [BN, D]. seen: bool [BN]; with MASKED the tokens that are not seen are zero, whatever lies there.
"""

import triton
import triton.language as tl


@triton.jit
def plain_tile(
    pages_ptr, page, start, seen, head, page_stride, token_stride, head_stride, BN: tl.constexpr, D: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Numbers as they are."""
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
