"""E4M3 codes with one scale for all, for each row, or for each block.

Layouts: the official block FP8 (`weight_scale_inv`, a factor in spite of its name), compressed-tensors float-quantized
and naive-quantized, and ModelOpt FP8, FP8_PER_CHANNEL_PER_TOKEN and FP8_PB_WO (`weight_scale`, of rank 4 in the last).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.linear.quantized import FP8_BLOCK, Quantized
from services.engine.weights.readers.parts import Matrix
from services.engine.weights.readers.scaling import scale_groups
from services.engine.weights.readers.scheme import Scheme

_SCALE_KINDS = ("F32", "BF16", "F16", "F8_E8M0")
_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
"""By code; much faster here than torch's conversion."""
_DEFAULT_BLOCK = (FP8_BLOCK, FP8_BLOCK)
_NAN_PLUS, _NAN_MINUS = 0x7F, 0xFF
"""E4M3 has no infinity; these are the only codes that are no numbers."""


class Float8:
    """An `Encoding`: `fp8`, or `fp8-block` where blocks are of multiples of 128 x 128. Blocks of other sizes are only
    decoded."""

    def __init__(self, matrix: Matrix, declared: Sequence[Scheme]) -> None:
        self._codes = matrix.part("weight")
        self._scale = matrix.part("weight_scale_inv" if "weight_scale_inv" in matrix.parts else "weight_scale")
        self._scale.expect(_SCALE_KINDS)
        self.shape = self._codes.shape
        if len(self.shape) not in (2, 3):
            raise self._codes.error(f"has the shape {list(self.shape)}; expected a matrix or a stack of them")
        self._stack = self.shape[0] if len(self.shape) == 3 else 1
        self._rows, self._columns = self.shape[-2:]
        block = next((scheme.block for scheme in declared if scheme.block is not None), None)
        self._block = self._find_block(block or _DEFAULT_BLOCK)
        self.scheme = Scheme("float", 8, block=self._block)
        self.format = self._format()

    def encoded(self, first: int, last: int) -> Quantized:
        codes = self._read_codes(first, last)
        if self._block is None:
            return Quantized("fp8", codes, row_scale=self._row_scale(first, last))
        if self.format != "fp8-block":
            raise self._scale.error(f"is of blocks of {self._block[0]} x {self._block[1]}; they can only be decoded")
        if first % FP8_BLOCK:
            raise self._codes.error(f"is of blocks: a piece of it cannot start at row {first}")
        scales = self._block_scales(first, last).repeat_interleave(self._block[1] // FP8_BLOCK, dim=1)
        high, wide = -(-(last - first) // FP8_BLOCK), -(-self._columns // FP8_BLOCK)
        # One scale for each 128 rows: those of larger blocks once more for each 128 of them.
        places = torch.arange(first, first + high * FP8_BLOCK, FP8_BLOCK) // self._block[0] - first // self._block[0]
        return Quantized("fp8-block", codes, scales[places, :wide].contiguous())

    def decoded(self, first: int, last: int) -> Tensor:
        values = torch.from_numpy(np.take(_VALUES, self._read_codes(first, last).numpy()))
        if self._block is None:
            return values.mul_(self._row_scale(first, last)[:, None])
        rows = torch.arange(first, last)
        places = self._block_row(rows) - self._block_row(rows[:1])
        return scale_groups(values, self._block_scales(first, last).float()[places], self._block[1])

    def _find_block(self, block: tuple[int, int]) -> tuple[int, int] | None:
        """None for scales of rows or of the whole. Raises ModelError when the scales' shape fits nothing."""
        high, wide = -(-self._rows // block[0]), -(-self._columns // block[1])
        lead = self.shape[:-2]
        per_block = [(*lead, high, wide)]
        if not lead:
            per_block.append((high, 1, wide, 1))
        if self._scale.shape in per_block:
            return block
        expected = [(*lead, self._rows, 1), (*lead, self._rows), (*lead, 1, 1), lead or (1,), ()]
        self._scale.expect(_SCALE_KINDS, *per_block, *expected, (1,))
        return None

    def _format(self) -> str:
        if self._block is None:
            return "fp8"
        # In a stack, the blocks of an expert must not reach into the next one.
        apart = self._stack == 1 or self._rows % self._block[0] == 0
        return "fp8-block" if apart and all(size % FP8_BLOCK == 0 for size in self._block) else "bf16"

    def _read_codes(self, first: int, last: int) -> Tensor:
        codes = self._codes.rows(first, last).view(torch.uint8)
        # The largest one as unsigned and as signed: no copy of the codes is made.
        if int(codes.amax()) == _NAN_MINUS or int(codes.view(torch.int8).amax()) == _NAN_PLUS:
            raise self._codes.error("holds values that are not finite; expected numbers")
        return codes

    def _row_scale(self, first: int, last: int) -> Tensor:
        scale = self._scale.finite(self._scale.whole().float()).reshape(-1)
        rows = torch.arange(first, last)
        if len(scale) == 1:
            return scale.expand(last - first).contiguous()
        return scale[rows // self._rows] if len(scale) == self._stack != 1 else scale[rows]

    def _block_scales(self, first: int, last: int) -> Tensor:
        """[blocks of these rows, blocks of a row], float32 or bfloat16."""
        assert self._block is not None
        start, end = self._block_row(torch.tensor([first, last - 1])).tolist()
        scales = self._scale.whole().flatten()
        scales = scales.view(-1, -(-self._columns // self._block[1]))[start : end + 1]
        return self._scale.finite(scales if scales.dtype == torch.bfloat16 else scales.float())

    def _block_row(self, rows: Tensor) -> Tensor:
        """The row of the scales, over all experts of a stack, that belongs to each of these."""
        assert self._block is not None
        high = -(-self._rows // self._block[0])
        return rows // self._rows * high + rows % self._rows // self._block[0]
