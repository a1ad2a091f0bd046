"""Plain torch, any device: the oracle. Gathers and decodes the pages of a sequence, then calls torch's attention."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.plan import AttentionPlan, GatheredPlan, PagedRows, SingleGroup, Span, gathered
from kernels.kv_codec import LayerKv, rotate

_QUERY_TILE = 512
"""Bounds the mask, which has a byte for each (query, key) pair of a tile."""


def paged_attention(q: Tensor, kv: LayerKv, plan: AttentionPlan, scale: float) -> Tensor:
    if isinstance(plan, GatheredPlan):
        return _gathered(q, kv, plan, scale)
    out = torch.empty_like(q)
    for rows in (*plan.few, *([] if plan.many is None else [plan.many])):
        own = _gathered(q if rows.tokens is None else q[rows.tokens], kv, _plan(rows, kv), scale)
        if rows.tokens is not None:
            out[rows.tokens] = own
        else:
            for first, count in zip(rows.batch.first.tolist(), rows.batch.counts.tolist(), strict=True):
                out[first : first + count] = own[first : first + count]
    return out


def _plan(rows: PagedRows, kv: LayerKv) -> GatheredPlan:
    """The page that fills up shorter sequences is any: its tokens are not seen, and must be finite."""
    batch = rows.batch
    counts, contexts, tables = batch.counts.tolist(), batch.contexts.tolist(), batch.tables.tolist()
    page_tokens = kv.keys.codes.shape[1]
    return gathered(counts, contexts, tables, page_tokens, 0, batch.counts.device, batch.first.tolist())


def _gathered(q: Tensor, kv: LayerKv, plan: GatheredPlan, scale: float) -> Tensor:
    if kv.form.rotated:
        q = rotate(q)
    out = torch.empty_like(q)
    for span in plan.spans:
        out[span.first : span.first + span.count] = _span(q, kv, span, scale)
    for group in plan.groups:
        out[group.queries] = _singles(q[group.queries], kv, group, scale)
    return rotate(out) if kv.form.rotated else out


def _span(q: Tensor, kv: LayerKv, span: Span, scale: float) -> Tensor:
    _, heads, dim = q.shape
    keys, values = (rows.read(span.pages, q.dtype).flatten(0, 1) for rows in (kv.keys, kv.values))
    kv_heads = keys.shape[1]
    queries = q[span.first : span.first + span.count].unflatten(1, (kv_heads, heads // kv_heads)).permute(1, 2, 0, 3)
    # One K/V head is broadcast over its group of query heads by a stride of 0.
    shape = (kv_heads, heads // kv_heads, span.context, dim)
    k = keys[: span.context].transpose(0, 1)[:, None].expand(shape)
    v = values[: span.context].transpose(0, 1)[:, None].expand(shape)
    past = span.context - span.count
    tiles = []
    for start in range(0, span.count, _QUERY_TILE):
        end = min(start + _QUERY_TILE, span.count)
        position = torch.arange(past + start, past + end, device=q.device)
        seen = torch.arange(past + end, device=q.device) <= position[:, None]
        tiles.append(
            scaled_dot_product_attention(
                queries[:, :, start:end], k[:, :, : past + end], v[:, :, : past + end], attn_mask=seen, scale=scale
            )
        )
    return torch.cat(tiles, dim=2).permute(2, 0, 1, 3).flatten(1, 2)


def _singles(q: Tensor, kv: LayerKv, group: SingleGroup, scale: float) -> Tensor:
    batch, heads, _ = q.shape
    flat = group.pages.flatten()
    keys, values = (rows.read(flat, q.dtype) for rows in (kv.keys, kv.values))
    kv_heads = keys.shape[2]
    k = keys.view(batch, -1, *keys.shape[2:]).transpose(1, 2)
    v = values.view(batch, -1, *values.shape[2:]).transpose(1, 2)
    # The query heads that share a K/V head take the place of the query positions.
    grouped = q.unflatten(1, (kv_heads, heads // kv_heads))
    return scaled_dot_product_attention(grouped, k, v, attn_mask=group.seen, scale=scale).flatten(1, 2)
