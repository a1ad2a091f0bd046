"""Attention of few queries a sequence (decode and verify): the bytes of K and V are the time, so they are read once.

Plain pages and coded ones have a kernel each. The context is split between programs, each of which works for all query
heads of a K/V head and for as many rows of the sequence as its launch says; a second kernel weights the parts and adds
them in their order (Flash-Decoding, Dao et al. 2023).
"""

from typing import Any

import torch
from torch import Tensor

from kernels.attention import coded
from kernels.attention import triton as kernels
from kernels.attention.batch import PagedBatch
from kernels.attention.launch import DecodeLaunch
from kernels.attention.shapes import LOG2_E, Pool, check_shapes, row_codec, wide
from kernels.kv_codec import LayerKv
from kernels.kv_codec.rows import PlainRows

_plain: Any = kernels.decode
_coded: Any = coded.decode
_combine: Any = kernels.combine
_COLUMNS, _CHUNK = 64, 64
"""Of a program of `combine`: numbers of a head, splits a round."""


def decode_workspace(rows: int, heads: int, head_dim: int, splits: int, device: torch.device) -> Tensor:
    """What `decode` needs for a flat batch of `rows` queries at most: float32, of 4 * rows * heads * splits *
    (head_dim + 1) bytes. Launches of one stream may share it."""
    return torch.empty(rows * heads * splits * (head_dim + 1), dtype=torch.float32, device=device)


def decode(
    q: Tensor,
    kv: LayerKv,
    batch: PagedBatch,
    scale: float,
    launch: DecodeLaunch,
    workspace: Tensor,
    out: Tensor,
    rows: int,
    longest: int,
) -> None:
    """Causal attention as `kernels.attention.paged_attention` has it, into `out`.

    q [T, heads, head_dim] and out like it, of bfloat16, float16 or float32, both of any strides but the last's. kv
    holds the K and V of these queries already: plain ones of q's dtype, with equal strides, or codes and scales as
    `layer_views` lays them, and nothing beside them is read. head_dim is a power of two, 16 at least (64 for nvfp4),
    page_tokens one, and a multiple of a round's tokens. scale > 0. `rows`: no sequence has more queries, `longest`: nor
    more tokens; all else is read on the device, so a captured launch serves every batch within these bounds. Rows of
    `out` that belong to no sequence stay as they are.

    Of coded pages products are of float16, for float32 queries of float32 (`coded`). So values of rk8v4 whose magnitude
    is above 65504 are infinite there, also for bfloat16.

    What lies in the pages behind a sequence's end is not used, be it NaN. Equal calls give equal bits, and so does a
    sequence beside any others, as long as the launch is the same. Raises ValueError for what does not fit together.
    """
    heads, dim = q.shape[1:]
    group = check_shapes(q, kv, out, launch.block_n * launch.slices)
    cells = len(q) * heads * launch.splits
    if workspace.numel() < cells * (dim + 1) or workspace.dtype != torch.float32:
        raise ValueError(f"a workspace of {workspace.numel()} numbers; {cells * (dim + 1)} are needed")
    if not len(batch.first) or not len(q):
        return
    partial, weight = workspace[: cells * dim], workspace[cells * dim :]
    page, kv_heads = kv.keys.codes.shape[1:3]
    blocks = -(-rows * group // launch.block_m)
    splits = max(1, min(launch.splits, -(-longest // (page * launch.least_pages))))
    grid = (splits * blocks, kv_heads, len(batch.first))
    sequences = batch.first, batch.counts, batch.contexts, batch.tables
    pdl = {"launch_pdl": True} if launch.pdl and q.is_cuda else {}
    pool = Pool.of(kv, launch.block_n, launch.tma)
    if isinstance(kv.keys.codec, PlainRows):
        _plain[grid](
            q, pool.keys, pool.values, partial, weight, *sequences, scale * LOG2_E, q.stride(0), q.stride(1),
            pool.page_stride, pool.token_stride, pool.head_stride, batch.tables.stride(0), blocks, launch.splits,
            GROUP=group, D=dim, PAGE=page, BM=launch.block_m, BN=launch.block_n, LEAST=launch.least_pages,
            STAGES=launch.stages, WIDE=wide(q), TMA=pool.described, PDL=bool(pdl), num_warps=launch.warps, **pdl,
        )  # fmt: skip
    else:
        keys, key_dims = row_codec(kv.keys.codec, dim)
        values, value_dims = row_codec(kv.values.codec, dim)
        if "nvfp4" in (keys, values) and dim < 64:
            raise ValueError(f"nvfp4 heads of {dim} dims")
        _coded[grid](
            q, pool.keys, pool.key_scales, pool.values, pool.value_scales, partial, weight, *sequences, scale * LOG2_E,
            q.stride(0), q.stride(1), pool.page_stride, batch.tables.stride(0), blocks, launch.splits, GROUP=group,
            D=dim, PAGE=page, BM=launch.block_m, BN=launch.block_n, SLICES=launch.slices, LEAST=launch.least_pages,
            STAGES=launch.stages, KEYS=keys, KEY_DIMS=key_dims, VALUES=values, VALUE_DIMS=value_dims, ASM=not wide(q),
            CVT=launch.converts, ROTATED=kv.form.rotated, PDL=bool(pdl), num_warps=launch.warps, **pdl,
        )  # fmt: skip
    columns = min(dim, _COLUMNS)
    _combine[(dim // columns, rows * heads, len(batch.first))](
        partial, weight, batch.first, batch.counts, batch.contexts, out, heads, out.stride(0), out.stride(1),
        launch.splits, D=dim, BD=columns, PAGE=page, LEAST=launch.least_pages,
        MOST=1 << (launch.splits - 1).bit_length(), CHUNK=_CHUNK, ROTATED=kv.form.rotated, PDL=bool(pdl),
        num_warps=4, **pdl,
    )  # fmt: skip
