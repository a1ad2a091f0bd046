"""One layer's K and V in the page pool."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.kv_codec.form import KvForm, plain_form
from kernels.kv_codec.rows import RowCodec


@dataclass(frozen=True, slots=True)
class Rows:
    """The K rows or the V rows of a layer in all pages: two views of the pool, of the codec's types."""

    codec: RowCodec
    codes: Tensor
    """[pages, page_tokens, kv_heads, code_count(head_dim)]; the last dim has stride 1, the others have any."""
    scales: Tensor
    """[pages, page_tokens, kv_heads, scale_count(head_dim)], the same. Plain rows have none: the last dim is 0."""

    def read(self, pages: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows of `pages` int64 [P], decoded: [P, page_tokens, kv_heads, head_dim]."""
        return self.codec.decode(self.codes.index_select(0, pages), self.scales.index_select(0, pages)).to(dtype)

    def write(self, rows: Tensor, pages: Tensor, offsets: Tensor) -> None:
        """rows [N, kv_heads, head_dim]; token n goes to its page and its offset there, int64 [N] both."""
        codes, scales = self.codec.encode(rows)
        self.codes[pages, offsets] = codes
        if scales.shape[-1]:
            self.scales[pages, offsets] = scales


@dataclass(frozen=True, slots=True)
class LayerKv:
    form: KvForm
    keys: Rows
    values: Rows


def plain_layer(keys: Tensor, values: Tensor) -> LayerKv:
    """K and V as they are, [pages, page_tokens, kv_heads, head_dim] both."""
    form = plain_form(keys.dtype)
    none = torch.empty((*keys.shape[:3], 0), dtype=torch.uint8, device=keys.device)
    return LayerKv(form, Rows(form.keys, keys, none), Rows(form.values, values, none))


def layer_views(pool: Tensor, form: KvForm, page_tokens: int, kv_heads: int, head_dim: int) -> list[LayerKv]:
    """The layers in a pool of pages, uint8 [pages, page_bytes], contiguous; page_bytes is a multiple of
    `page_tokens * kv_heads * form.row_bytes(head_dim)`, a layer's.

    In a page the layers follow each other, and in a layer: K codes, K scales, V codes, V scales, with nothing between.
    Plain K and V are [page_tokens, kv_heads, head_dim] each. Codes and scales of the other forms are
    [kv_heads, page_tokens, count]: what one head's attention reads of a page is a contiguous piece of codes and one of
    scales, each a multiple of 16 bytes and aligned to that for pages of 64 tokens.
    """
    head_first = form.keys.scale_count(head_dim) > 0
    start = 0

    def field(dtype: torch.dtype, count: int) -> Tensor:
        nonlocal start
        shape = (kv_heads, page_tokens, count) if head_first else (page_tokens, kv_heads, count)
        first, size = start // dtype.itemsize, math.prod(shape)
        start += size * dtype.itemsize
        view = pool.view(dtype)[:, first : first + size].unflatten(1, shape)
        return view.transpose(1, 2) if head_first else view

    def rows(codec: RowCodec) -> Rows:
        codes = field(codec.code_dtype, codec.code_count(head_dim))
        return Rows(codec, codes, field(codec.scale_dtype, codec.scale_count(head_dim)))

    layers: list[LayerKv] = []
    while start < pool.shape[1]:
        layers.append(LayerKv(form, rows(form.keys), rows(form.values)))
    return layers
