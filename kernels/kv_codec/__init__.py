"""How K and V of a token lie in a page: as they are, or in fewer bits (docs/kv-formats.md)."""

from torch import Tensor

from kernels.kv_codec import reference
from kernels.kv_codec.form import KvForm, KvFormat, kv_form, plain_form
from kernels.kv_codec.hadamard import rotate
from kernels.kv_codec.layer import LayerKv, Rows, layer_views, plain_layer

__all__ = [
    "KvForm",
    "KvFormat",
    "LayerKv",
    "Rows",
    "kv_form",
    "layer_views",
    "plain_form",
    "plain_layer",
    "rotate",
    "write",
]


def write(kv: LayerKv, k: Tensor, v: Tensor, pages: Tensor, offsets: Tensor) -> None:
    """Encode new tokens into one layer's pages, in place.

    k, v: [N, kv_heads, head_dim], of any float dtype, with position encoding and norms but not rotated. pages, offsets:
    int64 [N], where token n goes; no place may occur twice.
    """
    reference.write(kv, k, v, pages, offsets)
