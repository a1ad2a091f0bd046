"""All that happens to q, k and v between their projection and attention, in one launch.

A program takes one head of q, k or v of one token: it norms it, turns it by the token's position, rotates K and V where
the format asks for that, and writes q to a tensor of its own, K and V as codes and scales to the pages.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.kv_codec import triton as kernels
from kernels.kv_codec.e8 import E8Rows
from kernels.kv_codec.floats import Fp8Rows, Nvfp4Rows
from kernels.kv_codec.head_norm import HeadNorm
from kernels.kv_codec.integers import Int4Rows, Int8Rows
from kernels.kv_codec.layer import LayerKv, Rows
from kernels.kv_codec.rows import PlainRows, RowCodec

_kernel: Any = kernels.store
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
    out: Tensor,
    pdl: bool = False,
) -> None:
    """As `kv_codec.store`, with the same roundings; q goes to `out`.

    q, k, v and out, which is like q, are bfloat16, float16 or float32, with any strides but the last, which is 1. cos,
    sin float32 [T, R/2], contiguous, R > 0. pages, offsets contiguous. head_dim is a power of two, 16 at least, and a
    multiple of `kv.form.multiple`. On a GPU, or in Triton's interpreter.

    Given the same float32 rows, codes and scales are those of the torch codecs to the last bit, but that a NaN may be
    another NaN, and that E8 sums squares in an order of its own (`encode`), which decides between points that are
    equally near up to rounding and may change the last bit of a scale of 2-bit rows. The mean of squares of the norm
    has its own order, too.

    All is read on the device, so a captured launch serves any positions and places; none is compiled anew for another
    number of tokens. `pdl`: begin while the kernel before still runs (compute capability 9.0 and up). Raises ValueError
    for what does not fit together.
    """
    _check(kv, q, k, v, norm, cos, sin, pages, offsets, out)
    tokens, heads, dim = q.shape
    if not tokens:
        return
    weights = (q, k) if norm is None else (norm.q_weight, norm.k_weight)  # not used without a norm
    keys, key_group = scheme(kv.form.keys, dim)
    values, value_group = scheme(kv.form.values, dim)
    launch_pdl = {"launch_pdl": True} if pdl and q.is_cuda else {}
    tensors = [tensor for rows in (kv.keys, kv.values) for tensor in (_words(rows), rows.scales)]
    strides = [stride for tensor in tensors for stride in tensor.stride()[:3]]
    _kernel[(tokens, heads + 2 * k.shape[1])](
        q, k, v, *weights, cos, sin, pages, offsets, out, *tensors, 0.0 if norm is None else norm.eps,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2], *strides,
        HEADS=heads, KV_HEADS=k.shape[1], D=dim, TURNING=2 * cos.shape[1], NORM="none" if norm is None else norm.kind,
        ROTATED=kv.form.rotated, KEYS=keys, KEY_GROUP=key_group, VALUES=values, VALUE_GROUP=value_group,
        PDL=bool(launch_pdl), num_warps=1, enable_fp_fusion=False, **launch_pdl,
    )  # fmt: skip


def scheme(codec: RowCodec, dim: int) -> tuple[str, int]:
    """What the kernel calls the codec, and how many of the head's `dim` dims share a scale. Raises ValueError for one
    that it does not know."""
    match codec:
        case PlainRows():
            return "plain", dim
        case Int8Rows():
            return "int8", codec.group
        case Int4Rows():
            return "int4", codec.group
        case Fp8Rows():
            return "fp8", dim
        case Nvfp4Rows():
            return "nvfp4", codec.multiple
        case E8Rows(bits=4 | 2, group=64):
            return f"e8-{codec.bits}", 64
        case _:
            raise ValueError(f"no kernel writes {codec}")


def _words(rows: Rows) -> Tensor:
    """The codes as the kernel writes them: those of 8 dims that take 2 or 4 bytes are one integer."""
    match rows.codec:
        case Int4Rows() | Nvfp4Rows() | E8Rows(bits=4):
            word = torch.int32
        case E8Rows():
            word = torch.int16
        case _:
            return rows.codes
    codes, size = rows.codes, word.itemsize
    if codes.data_ptr() % size or any(stride % size for stride in codes.stride()[:3]):
        raise ValueError(f"codes that are not aligned to {size} bytes")
    return codes.view(word)


def _check(
    kv: LayerKv,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norm: HeadNorm | None,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    offsets: Tensor,
    out: Tensor,
) -> None:
    (tokens, _, dim), kv_heads = q.shape, k.shape[1]
    weights = () if norm is None else (norm.q_weight, norm.k_weight)
    if {tensor.dtype for tensor in (q, k, v, out, *weights)} != {q.dtype} or q.dtype not in _DTYPES:
        raise ValueError(f"q {q.dtype}, k {k.dtype}, v {v.dtype}, out {out.dtype}, {[w.dtype for w in weights]}")
    if k.shape != (tokens, kv_heads, dim) or v.shape != k.shape or out.shape != q.shape:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, out {tuple(out.shape)}")
    if dim < 16 or dim & (dim - 1) or dim % kv.form.multiple:
        raise ValueError(f"heads of {dim} dims as {kv.form.name}")
    turning = 2 * cos.shape[-1]
    if cos.shape != (tokens, turning // 2) or sin.shape != cos.shape or not 0 < turning <= dim:
        raise ValueError(f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)} for {tokens} tokens x {dim} dims")
    if cos.dtype != torch.float32 or sin.dtype != torch.float32 or {pages.dtype, offsets.dtype} != {torch.int64}:
        raise ValueError(f"cos {cos.dtype}, sin {sin.dtype}, pages {pages.dtype}, offsets {offsets.dtype}")
    if pages.shape != (tokens,) or offsets.shape != (tokens,) or any(weight.shape != (dim,) for weight in weights):
        raise ValueError(f"pages {tuple(pages.shape)}, offsets {tuple(offsets.shape)} for {tokens} tokens")
    if not all(tensor.is_contiguous() for tensor in (cos, sin, pages, offsets, *weights)):
        raise ValueError("angles, places and weights must be contiguous")
    for rows in (kv.keys, kv.values):
        counts = (rows.codec.code_count(dim), rows.codec.scale_count(dim))
        if (rows.codes.shape[2:], rows.scales.shape[2:]) != ((kv_heads, counts[0]), (kv_heads, counts[1])):
            raise ValueError(f"pages of {tuple(rows.codes.shape)} codes, {tuple(rows.scales.shape)} scales")
    if any(tensor.stride(-1) != 1 for tensor in (q, k, v, out, kv.keys.codes, kv.values.codes)):
        raise ValueError("numbers of a head do not follow each other")
