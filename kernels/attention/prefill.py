"""Attention of many queries a sequence (prefill) to its cache and to themselves: matrix products are the time."""

from typing import Any

from torch import Tensor

from kernels.attention import triton as kernels
from kernels.attention.batch import PagedBatch
from kernels.attention.launch import PrefillLaunch
from kernels.attention.shapes import LOG2_E, Pool, check_shapes, wide

_prefill: Any = kernels.prefill


def prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    scale: float,
    launch: PrefillLaunch,
    out: Tensor,
    rows: int,
) -> None:
    """As `decode.decode`, with the same contract, for any number of queries: `rows` is the most of a sequence. The
    context is not split, so few tiles of queries leave multiprocessors idle."""
    group = check_shapes(q, keys, values, out, launch.block_n)
    if not len(batch.first) or not len(q):
        return
    pool = Pool.of(keys, values, launch.block_n, launch.tma)
    _prefill[(-(-rows * group // launch.block_m), keys.shape[2], len(batch.first))](
        q, pool.keys, pool.values, out, batch.first, batch.counts, batch.contexts, batch.tables, scale * LOG2_E,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), pool.page_stride, *keys.stride()[1:3],
        batch.tables.stride(0), GROUP=group, D=q.shape[2], PAGE=keys.shape[1], BM=launch.block_m, BN=launch.block_n,
        STAGES=launch.stages, WIDE=wide(q), TMA=pool.described, num_warps=launch.warps,
    )  # fmt: skip
