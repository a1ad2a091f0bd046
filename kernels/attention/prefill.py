"""Attention of many queries a sequence (prefill) to its cache and to themselves: matrix products are the time.

So they get plain K and V. Coded pages are decoded once for all queries, a segment of the context after the other, and
the running softmax goes on from one to the next.
"""

from typing import Any

from torch import Tensor

from kernels.attention import triton as kernels
from kernels.attention.batch import PagedBatch
from kernels.attention.launch import PrefillLaunch
from kernels.attention.segments import Segments
from kernels.attention.shapes import LOG2_E, Pool, check_shapes, wide
from kernels.kv_codec import LayerKv
from kernels.kv_codec.rows import PlainRows

_prefill: Any = kernels.prefill


def prefill(
    q: Tensor,
    kv: LayerKv,
    batch: PagedBatch,
    scale: float,
    launch: PrefillLaunch,
    out: Tensor,
    rows: int,
    segments: Segments | None = None,
) -> None:
    """As `decode.decode`, with the same contract, for any number of queries: `rows` is the most of a sequence. The
    context is not split, so few tiles of queries leave multiprocessors idle.

    segments: of `Segments.of`, for the longest of the batch or more, where kv is coded. K and V are decoded to the type
    of q there, not rotated; of equal calls the bits are the same, however large the segments are.
    """
    group = check_shapes(q, kv, out, launch.block_n)
    if not len(batch.first) or not len(q):
        return
    if isinstance(kv.keys.codec, PlainRows):
        _run(q, kv, batch, scale, launch, out, rows, group, None, 0)
        return
    if segments is None or len(segments.plain.keys.codes) < len(batch.first) * segments.pages:
        raise ValueError(f"{kv.form.name}: no segments for {len(batch.first)} sequences")
    check_shapes(q, segments.plain, out, launch.block_n)
    for segment in range(segments.count):
        segments.fill(kv, batch, segment)
        _run(q, segments.plain, batch, scale, launch, out, rows, group, segments, segment)


def _run(
    q: Tensor,
    kv: LayerKv,
    batch: PagedBatch,
    scale: float,
    launch: PrefillLaunch,
    out: Tensor,
    rows: int,
    group: int,
    segments: Segments | None,
    segment: int,
) -> None:
    """kv: plain, of the pool or of the segments."""
    page, kv_heads, dim = kv.keys.codes.shape[1:]
    pool = Pool.of(kv, launch.block_n, launch.tma)
    carry = None if segments is None else segments.carry
    carried = (out, out, out) if carry is None else carry.all
    tokens = 0 if segments is None else segments.tokens
    _prefill[(kv_heads, -(-rows * group // launch.block_m), len(batch.first))](
        q, pool.keys, pool.values, out, *carried, batch.first, batch.counts, batch.contexts, batch.tables,
        scale * LOG2_E, q.stride(0), q.stride(1), out.stride(0), out.stride(1), pool.page_stride, pool.token_stride,
        pool.head_stride, batch.tables.stride(0), segment * tokens, tokens, GROUP=group, D=dim, PAGE=page,
        BM=launch.block_m, BN=launch.block_n, STAGES=launch.stages, WIDE=wide(q), TMA=pool.described,
        EARLY=launch.early, PAGED=segments is None, CARRIED=carry is not None, num_warps=launch.warps,
    )  # fmt: skip
