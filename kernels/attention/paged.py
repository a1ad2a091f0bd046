"""`paged_attention` on a GPU: few queries a sequence and many go to different kernels."""

import torch
from torch import Tensor

from kernels.attention.decode import decode, decode_workspace
from kernels.attention.launch import decode_launch, prefill_launch
from kernels.attention.plan import PagedPlan, PagedRows
from kernels.attention.prefill import prefill
from kernels.attention.segments import Segments
from kernels.attention.shapes import code_bits
from kernels.gpu import gpu
from kernels.kv_codec import LayerKv


def attend(q: Tensor, kv: LayerKv, plan: PagedPlan, scale: float) -> Tensor:
    """See `kernels.attention.paged_attention`. Rows that belong to no sequence are not written."""
    out = torch.empty_like(q)
    for rows in plan.few:
        if rows.tokens is None:
            _decode(q, kv, rows, scale, out)
        else:
            own = torch.empty_like(q[: len(rows.tokens)])
            _decode(q[rows.tokens], kv, rows, scale, own)
            out[rows.tokens] = own
    if plan.many is not None:
        batch = plan.many.batch
        launch = prefill_launch(q.shape[2], q.element_size(), gpu(q.device).capability)
        coded = code_bits(kv.form) is not None
        segments = Segments.of(q, kv, len(batch.first), plan.many.longest, launch) if coded else None
        prefill(q, kv, batch, scale, launch, out, plan.many.most, segments)
    return out


def _decode(q: Tensor, kv: LayerKv, rows: PagedRows, scale: float, out: Tensor) -> None:
    _, heads, dim = q.shape
    kv_heads = kv.keys.codes.shape[2]
    at = gpu(q.device)
    launch = decode_launch(
        rows.most, heads // kv_heads, dim, q.element_size(), kv_heads, at.processors, at.capability, code_bits(kv.form)
    )
    workspace = decode_workspace(len(q), heads, dim, launch.splits, q.device)
    decode(q, kv, rows.batch, scale, launch, workspace, out, rows.most, rows.longest)
