"""E2M1 codes, two in a byte, with an E4M3 scale for each 16 columns and a float32 one for the whole.

Layouts: compressed-tensors nvfp4-pack-quantized (`weight_packed`, divided by `weight_global_scale`) and ModelOpt NVFP4
(`weight`, multiplied by `weight_scale_2`). The first column of a byte lies in its low bits.
"""

import numpy as np
import torch
from torch import Tensor

from kernels.linear.quantized import E2M1, FORMATS, Quantized
from services.engine.weights.readers.parts import Matrix
from services.engine.weights.readers.scaling import scale_groups
from services.engine.weights.readers.scheme import Scheme

_GROUP = FORMATS["nvfp4"].group
_VALUES = np.array(E2M1, dtype=np.float32)


class Nvfp4:
    """An `Encoding`. `scales` of `encoded` are as stored, `row_scale` is the one of the whole, or of the expert."""

    format = "nvfp4"

    def __init__(self, matrix: Matrix) -> None:
        divided = "weight_packed" in matrix.parts
        self._codes = matrix.part("weight_packed" if divided else "weight")
        self._scales = matrix.part("weight_scale")
        self._global = matrix.part("weight_global_scale" if divided else "weight_scale_2")
        self._divided = divided
        self._codes.expect(("U8",))
        lead = self._codes.shape[:-2]
        if len(self._codes.shape) not in (2, 3) or self._codes.shape[-1] * 2 % _GROUP:
            raise self._codes.error(
                f"has the shape {list(self._codes.shape)}; expected a matrix or a stack of them, with a multiple of "
                f"{_GROUP // 2} bytes a row"
            )
        self.shape = (*self._codes.shape[:-1], self._codes.shape[-1] * 2)
        self._scales.expect(("F8_E4M3",), (*self.shape[:-1], self.shape[-1] // _GROUP))
        self._global.expect(("F32",), (), (1,), *([lead, (*lead, 1), (*lead, 1, 1)] if lead else []))
        self.scheme = Scheme("float", 4, _GROUP)

    def encoded(self, first: int, last: int) -> Quantized:
        packed = self._codes.rows(first, last)
        codes = torch.empty((*packed.shape, 2), dtype=torch.uint8)
        torch.bitwise_and(packed, 0xF, out=codes[..., 0])
        torch.bitwise_right_shift(packed, 4, out=codes[..., 1])
        scales = self._scales.finite(self._scales.rows(first, last))
        return Quantized("nvfp4", codes.flatten(1), scales, self._row_scale(first, last))

    def decoded(self, first: int, last: int) -> Tensor:
        natural = self.encoded(first, last)
        assert natural.scales is not None
        assert natural.row_scale is not None
        values = torch.from_numpy(np.take(_VALUES, natural.codes.numpy()))
        return scale_groups(values, natural.scales.float(), _GROUP).mul_(natural.row_scale[:, None])

    def _row_scale(self, first: int, last: int) -> Tensor:
        scale = self._global.whole().float().reshape(-1)
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise self._global.error(f"is {scale[0].item() if len(scale) == 1 else scale.tolist()}; expected above 0")
        if self._divided:
            scale = 1.0 / scale
        if len(scale) == 1:
            return scale.expand(last - first).contiguous()
        return scale[torch.arange(first, last) // self.shape[-2]]
