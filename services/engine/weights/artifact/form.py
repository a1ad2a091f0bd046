"""How a matrix lies in a shard: its natural form with codes of fewer than 8 bits joined, row by row.

That is not the form that kernels read. Theirs follows the GPUs and changes; files should not, and the way from here to
there takes a GPU a second. Any range of rows is one run of bytes in each tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from kernels.linear.grouped import form as grouped
from kernels.linear.grouped.form import Grouped, Layout
from kernels.linear.quantized import FORMATS, FP8_BLOCK, Quantized, dequantize
from services.engine.weights.artifact import bits

DTYPES = {"bf16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""Of the formats that are not quantized."""

Natural = Quantized | Grouped | Tensor
"""Rows of a matrix; a Tensor [N, K] where they are not quantized."""


@dataclass(frozen=True, slots=True)
class Field:
    """A tensor of a group."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Form:
    format: str
    """A key of FORMATS, GROUPED, or a key of DTYPES."""
    columns: int
    layout: Layout | None = None
    """Of GROUPED."""

    @classmethod
    def of(cls, natural: Natural, format: str) -> "Form":
        if isinstance(natural, Tensor):
            return cls(format, natural.shape[1])
        return cls(format, natural.columns, natural.layout if isinstance(natural, Grouped) else None)

    def fields(self, sample: Mapping[str, Tensor], rows: int) -> dict[str, Field]:
        """The tensors of `rows` rows, from those of a few."""
        return {
            name: Field(tensor.dtype, (self._range(name, 0, rows)[1], *tensor.shape[1:]))
            for name, tensor in sample.items()
        }

    def rows(self, tensors: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        """Views of [first, last); `first` is a multiple of 128 for fp8-block."""
        ranges = {name: self._range(name, first, last) for name in tensors}
        return {name: tensor[slice(*ranges[name])] for name, tensor in tensors.items()}

    def natural(self, tensors: Mapping[str, Tensor]) -> Natural:
        """The inverse of `stored`. Raises ValueError when tensors are missing or do not fit each other."""
        if self.format in DTYPES:
            return tensors["values"]
        if self.layout is not None:
            codes = bits.split(tensors["codes"], self.layout.bits, self.columns)
            return Grouped(self.layout, codes, **{name: tensor for name, tensor in tensors.items() if name != "codes"})
        form = FORMATS[self.format]
        codes = bits.split(tensors["codes"], form.bits, self.columns)
        if form.integer:
            codes = (codes.to(torch.int16) - 2 ** (form.bits - 1)).to(torch.int8)
        return Quantized(self.format, codes, tensors.get("scales"), tensors.get("row_scale"))

    def _range(self, field: str, first: int, last: int) -> tuple[int, int]:
        if self.format == "fp8-block" and field == "scales":
            if first % FP8_BLOCK:
                raise ValueError(f"a piece of fp8-block cannot start at row {first}")
            return first // FP8_BLOCK, -(-last // FP8_BLOCK)
        return first, last


def stored(natural: Natural) -> dict[str, Tensor]:
    """The tensors of a shard by field: `values`, or those of `Quantized` or `Grouped`, codes joined; integer codes with
    an offset of 2^(bits - 1)."""
    if isinstance(natural, Tensor):
        return {"values": natural}
    if isinstance(natural, Grouped):
        named = {
            "codes": bits.join(natural.codes, natural.layout.bits),
            "scales": natural.scales,
            "sub_scales": natural.sub_scales,
            "mins": natural.mins,
            "sub_mins": natural.sub_mins,
        }
    else:
        form = FORMATS[natural.format]
        codes = natural.codes
        if form.integer:
            codes = (codes.to(torch.int16) + 2 ** (form.bits - 1)).to(torch.uint8)
        named = {"codes": bits.join(codes, form.bits), "scales": natural.scales, "row_scale": natural.row_scale}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def tensors(natural: Natural) -> list[Tensor]:
    """Codes and scales, in a fixed order."""
    if isinstance(natural, Tensor):
        return [natural]
    if isinstance(natural, Quantized):
        found = (natural.codes, natural.scales, natural.row_scale)
    else:
        found = (natural.codes, natural.scales, natural.sub_scales, natural.mins, natural.sub_mins)
    return [tensor for tensor in found if tensor is not None]


def decoded(natural: Natural) -> Tensor:
    """float32 [N, K]."""
    if isinstance(natural, Tensor):
        return natural.float()
    return grouped.dequantize(natural) if isinstance(natural, Grouped) else dequantize(natural)


def moved(natural: Natural, device: torch.device) -> Natural:
    """The same on a device."""
    if isinstance(natural, Tensor):
        return natural.to(device)

    def to(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    codes = natural.codes.to(device)
    if isinstance(natural, Quantized):
        return Quantized(natural.format, codes, to(natural.scales), to(natural.row_scale))
    return Grouped(
        natural.layout,
        codes,
        natural.scales.to(device),
        to(natural.sub_scales),
        to(natural.mins),
        to(natural.sub_mins),
    )


def pieces(rows: int, columns: int, elements: int) -> list[tuple[int, int]]:
    """Ranges of rows of about so many elements, which start at multiples of 256 rows."""
    step = max(1, elements // (columns * 256)) * 256
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]
