"""Causal attention of a mixed batch (prefill chunks and decodes) over paged K and V."""

from torch import Tensor

from kernels.attention import reference
from kernels.attention.batch import PagedBatch
from kernels.attention.plan import AttentionPlan, PagedPlan, PagedRows, plan_attention
from kernels.kv_codec import LayerKv, kernels_take

__all__ = ["AttentionPlan", "PagedBatch", "PagedPlan", "PagedRows", "paged_attention", "plan_attention"]


def paged_attention(q: Tensor, kv: LayerKv, plan: AttentionPlan, scale: float) -> Tensor:
    """softmax(q K^T * scale) V for each query over the tokens up to its own position (Vaswani et al. 2017), where
    query head h reads K/V head h // (heads // kv_heads) (Ainslie et al. 2023).

    q: [T, heads, head_dim], all queries of the step, not rotated whatever the form of `kv`. kv: one layer's views of
    the pool, which hold the K and V of this step's tokens already. Returns a tensor like q, not rotated either.

    With a `PagedPlan`, as `plan_attention` makes for a GPU, kernels read the pages where they lie; all but the bounds
    of the plan is read on the device, so a graph may capture it, and rows of the result that belong to no sequence hold
    anything. Without one, what a page holds behind a sequence's end must decode to finite values: it is weighted by 0.
    """
    if isinstance(plan, PagedPlan) and q.is_cuda and kernels_take(q.shape[2]):
        from kernels.attention import paged  # triton exists on Linux only

        return paged.attend(q, kv, plan, scale)
    return reference.paged_attention(q, kv, plan, scale)
