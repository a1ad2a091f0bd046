"""Attention of many queries a sequence (prefill) to its cache and to themselves: matrix products are the time."""

from typing import Any

import torch
from torch import Tensor

from kernels.attention import triton as kernels
from kernels.attention.batch import PagedBatch
from kernels.attention.launch import PrefillLaunch
from kernels.attention.shapes import LOG2_E, Pool, check_shapes, rotate_back, row_codec, wide
from kernels.kv_codec import LayerKv, rotate

_prefill: Any = kernels.prefill


def prefill(
    q: Tensor, kv: LayerKv, batch: PagedBatch, scale: float, launch: PrefillLaunch, out: Tensor, rows: int
) -> None:
    """As `decode.decode`, with the same contract, for any number of queries: `rows` is the most of a sequence. The
    context is not split, so few tiles of queries leave multiprocessors idle, and each tile decodes what it reads. Of
    rotated formats torch rotates the queries before and the output after."""
    group = check_shapes(q, kv, out, launch.block_n)
    if not len(batch.first) or not len(q):
        return
    if kv.form.rotated:
        q = rotate(q)
    attended = torch.empty_like(q) if kv.form.rotated else out
    page, kv_heads = kv.keys.codes.shape[1:3]
    dim = q.shape[2]
    pool = Pool.of(kv, launch.block_n, launch.tma)
    keys, key_dims = row_codec(kv.keys.codec, dim)
    values, value_dims = row_codec(kv.values.codec, dim)
    _prefill[(-(-rows * group // launch.block_m), kv_heads, len(batch.first))](
        q, pool.keys, pool.key_scales, pool.values, pool.value_scales, attended, batch.first, batch.counts,
        batch.contexts, batch.tables, scale * LOG2_E, q.stride(0), q.stride(1), attended.stride(0), attended.stride(1),
        pool.page_stride, pool.token_stride, pool.head_stride, batch.tables.stride(0), GROUP=group, D=dim, PAGE=page,
        BM=launch.block_m, BN=launch.block_n, STAGES=launch.stages, KEYS=keys, KEY_DIMS=key_dims, VALUES=values,
        VALUE_DIMS=value_dims, HALF=q.dtype == torch.float16, WIDE=wide(q), TMA=pool.described, num_warps=launch.warps,
    )  # fmt: skip
    if kv.form.rotated:
        rotate_back(attended, batch, out)
