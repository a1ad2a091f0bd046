"""A quantized matrix in the form that the kernels read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.linear import packing
from kernels.linear.quantized import FORMATS, Quantized


@dataclass(frozen=True, slots=True)
class Weight:
    """Immutable. `kernels.linear.packing` says how codes and scales lie."""

    format: str
    rows: int
    columns: int
    """Without the padding that `codes` may have."""
    codes: Tensor
    scales: Tensor | None = None
    row_scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """What one pass over the matrix reads."""
        return sum(part.nbytes for part in (self.codes, self.scales, self.row_scale) if part is not None)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def tensors(self) -> dict[str, Tensor]:
        """By field name, for storing; `Weight(format, rows, columns, **tensors)` is the inverse."""
        named = {"codes": self.codes, "scales": self.scales, "row_scale": self.row_scale}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def to(self, device: torch.device) -> "Weight":
        return replace(self, **{name: tensor.to(device) for name, tensor in self.tensors().items()})


def pack(quantized: Quantized) -> Weight:
    """Exact. Any device; the result is contiguous and lies where the codes do."""
    codes, scales = packing.pack(quantized)
    return Weight(quantized.format, quantized.rows, quantized.columns, codes, scales, quantized.row_scale)


def unpack(weight: Weight) -> Quantized:
    """The inverse of `pack`, bit for bit."""
    codes, scales = packing.unpack(weight.format, weight.codes, weight.scales, weight.rows, weight.columns)
    return Quantized(weight.format, codes, scales, weight.row_scale)


def stack(parts: Sequence[Weight]) -> Weight:
    """One above the other: all of one format and of as many columns. Parts of fp8-block must have a multiple of 128
    rows, but for the last. Raises ValueError."""
    first = parts[0]
    if any((part.format, part.columns) != (first.format, first.columns) for part in parts):
        raise ValueError(f"cannot stack {[(part.format, part.columns) for part in parts]}")
    if first.format == "fp8-block" and any(part.rows % FORMATS["fp8-block"].group for part in parts[:-1]):
        raise ValueError(f"cannot stack fp8-block matrices of {[part.rows for part in parts]} rows")
    dims = {
        "codes": packing.row_dim(first.format, codes=True),
        "scales": packing.row_dim(first.format, codes=False),
        "row_scale": 0,
    }
    joined = {name: torch.cat([part.tensors()[name] for part in parts], dim=dims[name]) for name in first.tensors()}
    return Weight(first.format, sum(part.rows for part in parts), first.columns, **joined)
