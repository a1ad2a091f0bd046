"""What the attention kernels ask of their tensors."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = math.log2(math.e)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_shapes(q: Tensor, keys: Tensor, values: Tensor, out: Tensor, block_n: int) -> int:
    """How many query heads share a K/V head. Raises ValueError for what the kernels would read wrongly."""
    heads, dim = q.shape[1:]
    page_tokens, kv_heads = keys.shape[1:3]
    if keys.shape != values.shape or keys.stride() != values.stride() or keys.shape[3] != dim or out.shape != q.shape:
        raise ValueError(f"q {tuple(q.shape)}, K {tuple(keys.shape)}, V {tuple(values.shape)}, out {tuple(out.shape)}")
    if q.dtype not in DTYPES or {keys.dtype, values.dtype} != {q.dtype}:
        raise ValueError(f"q {q.dtype}, K {keys.dtype}, V {values.dtype}")
    if any(tensor.stride(-1) != 1 for tensor in (q, keys, out)):
        raise ValueError("numbers of a head do not follow each other")
    if heads % kv_heads or dim < 16 or dim & (dim - 1) or page_tokens & (page_tokens - 1) or page_tokens % block_n:
        raise ValueError(f"{heads}/{kv_heads} heads x {dim}, pages of {page_tokens} tokens in tiles of {block_n}")
    return heads // kv_heads


def wide(q: Tensor) -> bool:
    """Products are of float32: for float32 numbers, and in Triton's interpreter, whose bfloat16 arithmetic is wrong."""
    return q.dtype == torch.float32 or not q.is_cuda


@dataclass(frozen=True, slots=True)
class Pool:
    """keys and values as the kernels take them."""

    keys: Tensor | TensorDescriptor
    values: Tensor | TensorDescriptor
    page_stride: int
    """Numbers between pages, or rows of the descriptors."""
    described: bool

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, block_n: int, tma: bool) -> "Pool":
        """Described where that is asked for and possible: pages whole rows apart, heads beside each other, starts and
        rows at 16 bytes, less than 2^31 rows."""
        pages, page_tokens, kv_heads, dim = keys.shape
        page, token, head, _ = keys.stride()
        aligned = all(place % 16 == 0 for place in (keys.data_ptr(), values.data_ptr(), token * keys.itemsize))
        if not tma or not aligned or page % token or head != dim or pages * (page // token) >= 2**31:
            return cls(keys, values, page, False)
        rows = (pages - 1) * (page // token) + page_tokens
        shape, strides, block = [rows, kv_heads * dim], [token, 1], [block_n, dim]
        described = [TensorDescriptor(tensor, shape, strides, block) for tensor in (keys, values)]
        return cls(described[0], described[1], page // token, True)
