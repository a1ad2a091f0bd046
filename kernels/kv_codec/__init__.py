"""How K and V of a token lie in a page: as they are, or in fewer bits (docs/kv-formats.md)."""

import torch
from torch import Tensor

from kernels.kv_codec import reference
from kernels.kv_codec.form import KvForm, KvFormat, kernels_take, kv_form, plain_form
from kernels.kv_codec.hadamard import rotate
from kernels.kv_codec.head_norm import HeadNorm
from kernels.kv_codec.layer import LayerKv, Rows, layer_views, plain_layer

__all__ = [
    "HeadNorm",
    "KvForm",
    "KvFormat",
    "LayerKv",
    "Rows",
    "kernels_take",
    "kv_form",
    "layer_views",
    "plain_form",
    "plain_layer",
    "rotate",
    "store",
    "write",
]


def store(
    kv: LayerKv,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norm: HeadNorm | None,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    offsets: Tensor,
) -> Tensor:
    """All that happens to q, k and v between their projection and attention:

        q = norm_rope.rotate(norm(q), cos, sin)
        k = norm_rope.rotate(norm(k), cos, sin)
        write(kv, k, v, pages, offsets)

    q [T, heads, head_dim], k and v [T, kv_heads, head_dim], of one float dtype with the norm's weights. cos, sin
    float32 [T, R/2], R <= head_dim. pages, offsets int64 [T], where token n goes; no place may occur twice, and a token
    with a negative page is nobody's: its K and V go nowhere, its q is computed. Returns q, not rotated, whatever kv's
    form: attention does that. On a GPU one launch, which a graph may capture, if `kernels_take` the heads.
    """
    if q.is_cuda and kernels_take(q.shape[2]):
        from kernels.kv_codec import launches  # triton exists on Linux only
        from kernels.overlap import overlaps

        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        launches.store(kv, q, k, v, norm, cos, sin, pages, offsets, out, pdl=overlaps(q.device))
        return out
    return reference.store(kv, q, k, v, norm, cos, sin, pages, offsets)


def write(kv: LayerKv, k: Tensor, v: Tensor, pages: Tensor, offsets: Tensor) -> None:
    """Encode new tokens into one layer's pages, in place.

    k, v: [N, kv_heads, head_dim], of any float dtype, with position encoding and norms but not rotated. pages, offsets:
    int64 [N], where token n goes; no place may occur twice.
    """
    reference.write(kv, k, v, pages, offsets)
