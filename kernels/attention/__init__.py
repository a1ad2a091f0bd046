"""Causal attention of a mixed batch (prefill chunks and decodes) over paged K and V."""

from torch import Tensor

from kernels.attention import reference
from kernels.attention.plan import AttentionPlan, plan_attention
from kernels.kv_codec import LayerKv

__all__ = ["AttentionPlan", "paged_attention", "plan_attention"]


def paged_attention(q: Tensor, kv: LayerKv, plan: AttentionPlan, scale: float) -> Tensor:
    """softmax(q K^T * scale) V for each query over the tokens up to its own position (Vaswani et al. 2017), where
    query head h reads K/V head h // (heads // kv_heads) (Ainslie et al. 2023).

    q: [T, heads, head_dim], all queries of the step, not rotated whatever the form of `kv`. kv: one layer's views of
    the pool, which hold the K and V of this step's tokens already. Returns a tensor like q, not rotated either. What a
    page holds behind a sequence's end must decode to finite values: it is weighted by 0.
    """
    return reference.paged_attention(q, kv, plan, scale)
