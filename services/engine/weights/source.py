"""What a checkpoint with quantized weights offers beside `Checkpoint`: its codes and scales, as stored."""

from typing import Protocol

from kernels.linear.grouped.form import Grouped
from kernels.linear.quantized import Quantized
from services.engine.weights.checkpoint import Checkpoint

GROUPED = "grouped"
"""The format of what is none of `FORMATS` and kept as `Grouped`."""
DENSE = ("bf16", "float16", "float32")
"""Formats of tensors that are not quantized: `read` gives them, `encoded` does not."""


class QuantizedSource(Checkpoint, Protocol):
    """Names are those of `Checkpoint.names`: decoded tensors only, none of their scales.

    A checkpoint without any quantized tensor answers `format` with the dtype of each.
    """

    def format(self, name: str) -> str:
        """Of a tensor as it is stored: a key of `FORMATS`, GROUPED, or one of DENSE."""
        ...

    def encoded(self, name: str, first: int, last: int) -> Quantized | Grouped:
        """Rows [first, last) of a quantized tensor, codes and scales exactly as stored: of a matrix, or of experts
        [E, N, K] as one of E * N rows. `first` is a multiple of 128 for fp8-block. Takes memory for these rows only.
        Raises ModelError."""
        ...
