"""Plain torch, any device: the oracle."""

from torch import Tensor

from kernels.kv_codec.hadamard import rotate
from kernels.kv_codec.layer import LayerKv


def write(kv: LayerKv, k: Tensor, v: Tensor, pages: Tensor, offsets: Tensor) -> None:
    if kv.form.rotated:
        # In float32: the rotated values are rounded once, to their codes.
        k, v = rotate(k.float()), rotate(v.float())
    kv.keys.write(k, pages, offsets)
    kv.values.write(v, pages, offsets)
