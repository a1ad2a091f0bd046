"""Plain torch, any device: the oracle."""

from torch import Tensor

from kernels import norm_rope
from kernels.kv_codec.hadamard import rotate
from kernels.kv_codec.head_norm import HeadNorm
from kernels.kv_codec.layer import LayerKv


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
    if norm is not None:
        q, k = _normed(q, norm.q_weight, norm), _normed(k, norm.k_weight, norm)
    q, k = norm_rope.rotate(q, cos, sin), norm_rope.rotate(k, cos, sin)
    kept = pages >= 0
    if not bool(kept.all()):
        k, v, pages, offsets = k[kept], v[kept], pages[kept], offsets[kept]
    write(kv, k, v, pages, offsets)
    return q


def _normed(x: Tensor, weight: Tensor, norm: HeadNorm) -> Tensor:
    if norm.kind == "centred":
        return norm_rope.rms_norm_centred(x, weight, norm.eps, weight.dtype)
    return norm_rope.rms_norm(x, weight, norm.eps)


def write(kv: LayerKv, k: Tensor, v: Tensor, pages: Tensor, offsets: Tensor) -> None:
    if kv.form.rotated:
        # In float32: the rotated values are rounded once, to their codes.
        k, v = rotate(k.float()), rotate(v.float())
    kv.keys.write(k, pages, offsets)
    kv.values.write(v, pages, offsets)
