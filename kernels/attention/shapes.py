"""What the attention kernels ask of their tensors."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.kv_codec import KvForm, LayerKv
from kernels.kv_codec.e8 import E8Rows
from kernels.kv_codec.floats import Fp8Rows, Nvfp4Rows
from kernels.kv_codec.integers import Int4Rows, Int8Rows
from kernels.kv_codec.rows import PlainRows, RowCodec

LOG2_E = math.log2(math.e)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_shapes(q: Tensor, kv: LayerKv, out: Tensor, block_n: int) -> int:
    """How many query heads share a K/V head. Raises ValueError for what the kernels would read wrongly."""
    heads, dim = q.shape[1:]
    page_tokens, kv_heads = kv.keys.codes.shape[1:3]
    if out.shape != q.shape or q.dtype not in DTYPES or q.stride(-1) != 1 or out.stride(-1) != 1:
        raise ValueError(f"q {q.dtype} {tuple(q.shape)} of strides {q.stride()}, out {tuple(out.shape)} {out.stride()}")
    if heads % kv_heads or dim < 16 or dim & (dim - 1) or page_tokens & (page_tokens - 1) or page_tokens % block_n:
        raise ValueError(f"{heads}/{kv_heads} heads x {dim}, pages of {page_tokens} tokens in tiles of {block_n}")
    for rows in (kv.keys, kv.values):
        if rows.codes.shape[1:] != (page_tokens, kv_heads, rows.codec.code_count(dim)) or dim % rows.codec.multiple:
            raise ValueError(f"{rows.codec} {tuple(rows.codes.shape)} for heads of {dim} and K of {page_tokens} tokens")
    if isinstance(kv.keys.codec, PlainRows):
        _check_plain(q, kv.keys.codes, kv.values.codes)
    else:
        _check_coded(kv)
    return heads // kv_heads


def _check_plain(q: Tensor, keys: Tensor, values: Tensor) -> None:
    if {keys.dtype, values.dtype} != {q.dtype}:
        raise ValueError(f"q {q.dtype}, K {keys.dtype}, V {values.dtype}")
    if keys.stride() != values.stride() or keys.stride(-1) != 1:
        raise ValueError(f"strides of K {keys.stride()}, of V {values.stride()}")


def _check_coded(kv: LayerKv) -> None:
    """A head's rows of a page are one piece, as `layer_views` lays them, and words begin at multiples of 4 bytes."""
    page_bytes = _page_bytes(kv.keys.codes)
    for tensor in (kv.keys.codes, kv.keys.scales, kv.values.codes, kv.values.scales):
        _, page_tokens, _, count = tensor.shape
        words = page_bytes % 4 == 0 and tensor.data_ptr() % 4 == 0 and page_tokens * count * tensor.itemsize % 4 == 0
        if tensor.stride()[1:] != (count, page_tokens * count, 1) or _page_bytes(tensor) != page_bytes or not words:
            raise ValueError(f"{kv.form.name}: {tensor.dtype} {tuple(tensor.shape)} of strides {tensor.stride()}")


def _page_bytes(tensor: Tensor) -> int:
    return tensor.stride(0) * tensor.itemsize


def row_codec(codec: RowCodec, dim: int) -> tuple[str, int]:
    """Its name in the kernels and how many dims share a scale. Raises ValueError for one that they do not read."""
    match codec:
        case PlainRows():
            return "plain", 0
        case Fp8Rows():
            return "fp8", dim
        case Int8Rows():
            return "int8", codec.group
        case Int4Rows():
            return "int4", codec.group
        case Nvfp4Rows():
            return "nvfp4", 16
        case E8Rows():
            return ("e8x4" if codec.bits == 4 else "e8x2"), codec.group
        case _:
            raise ValueError(f"no kernel reads {codec}")


def wide(q: Tensor) -> bool:
    """Products are of float32: for float32 numbers, and in Triton's interpreter, whose bfloat16 arithmetic is wrong."""
    return q.dtype == torch.float32 or not q.is_cuda


def code_bits(form: KvForm) -> int | None:
    """What the launches want to know of a form: None where it is plain."""
    if isinstance(form.keys, PlainRows):
        return None
    return min(rows.code_count(64) * rows.code_dtype.itemsize * 8 // 64 for rows in (form.keys, form.values))


@dataclass(frozen=True, slots=True)
class Pool:
    """K and V of a layer as the kernels take them."""

    keys: Tensor | TensorDescriptor
    key_scales: Tensor
    values: Tensor | TensorDescriptor
    value_scales: Tensor
    page_stride: int
    """Between pages: numbers of plain K and V, rows of descriptors, 32-bit words of codes and scales."""
    token_stride: int
    head_stride: int
    described: bool

    @classmethod
    def of(cls, kv: LayerKv, block_n: int, tma: bool) -> "Pool":
        """Plain K and V are described where that is asked for and possible: pages whole rows apart, heads beside each
        other, starts and rows at 16 bytes, less than 2^31 rows."""
        keys, values = kv.keys.codes, kv.values.codes
        pages, page_tokens, kv_heads, dim = keys.shape
        page, token, head, _ = keys.stride()
        if not isinstance(kv.keys.codec, PlainRows):
            return cls(keys, kv.keys.scales, values, kv.values.scales, _page_bytes(keys) // 4, 0, 0, False)
        aligned = all(place % 16 == 0 for place in (keys.data_ptr(), values.data_ptr(), token * keys.itemsize))
        if not tma or not aligned or page % token or head != dim or pages * (page // token) >= 2**31:
            return cls(keys, keys, values, values, page, token, head, False)
        rows = (pages - 1) * (page // token) + page_tokens
        shape, strides, block = [rows, kv_heads * dim], [token, 1], [block_n, dim]
        described = [TensorDescriptor(tensor, shape, strides, block) for tensor in (keys, values)]
        return cls(described[0], keys, described[1], values, page // token, token, head, True)
