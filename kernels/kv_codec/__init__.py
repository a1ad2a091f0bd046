"""How K and V of a token lie in a page. For now as they are, in the pool's own dtype."""

from torch import Tensor

from kernels.kv_codec import reference


def write(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, pages: Tensor, offsets: Tensor) -> None:
    """Scatter new tokens into one layer's pages, in place.

    keys, values: the layer's views of the pool, [pages, 64, kv_heads, head_dim], any strides between pages.
    k, v: [N, kv_heads, head_dim]. pages, offsets: int64 [N], where token n goes; no place may occur twice.
    """
    reference.write(keys, values, k, v, pages, offsets)
