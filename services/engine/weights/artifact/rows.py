"""A tensor of a source on its way to another format, in pieces of rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor

from kernels.linear.quantized import FORMATS
from services.engine.model.config import ModelError
from services.engine.weights.artifact.form import DTYPES, Natural, decoded, moved, pieces
from services.engine.weights.codecs import encode
from services.engine.weights.source import QuantizedSource

PIECE_ELEMENTS = {"cpu": 2**20, "cuda": 2**25}
"""By type of device: 4 and 128 MiB of float32, of which a codec needs a few at once. nvfp4 of 45M weights, one core of
an EPYC: 2.5 s with 2^18 and 2^20, 3.2 s with 2^22, whose temporaries are given back to the system each time."""


@dataclass(frozen=True, slots=True)
class Piece:
    first: int
    last: int
    natural: Natural
    """On the device."""
    squares: tuple[float, float]
    """Sums over (written - source)^2 and source^2."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Of one tensor. Without a change of format, codes and scales stay as they are."""

    source: QuantizedSource
    name: str
    format: str
    """To write."""
    scale_dtype: torch.dtype | None = None

    @property
    def rows(self) -> int:
        return prod(self.source.shape(self.name)[:-1])

    @property
    def columns(self) -> int:
        return (self.source.shape(self.name) or (1,))[-1]

    @property
    def keeps(self) -> bool:
        return self.format == self.source.format(self.name)

    def ranges(self, device: torch.device) -> list[tuple[int, int]]:
        """Of rows: those of `pieces`."""
        return pieces(self.rows, self.columns, PIECE_ELEMENTS[device.type])

    def pieces(self, device: torch.device) -> Iterator[Piece]:
        """All rows, ascending. Takes memory for a piece, and for the whole tensor as it is stored when it is not
        quantized. Raises ModelError."""
        reader = _Reader(self.source, self.name, self.rows, self.columns, device)
        ranges = self.ranges(device)
        if self.keeps:
            for first, last in ranges:
                yield Piece(first, last, reader.natural(first, last), (0.0, 0.0))
            return
        largest = self._largest(reader, ranges) if self.format == "nvfp4" else None
        for first, last in ranges:
            values = reader.values(first, last)
            written = self._encoded(values, None if largest is None else largest[first:last])
            error = (decoded(written) - values).square().sum(dtype=torch.float64)
            yield Piece(first, last, written, (float(error), float(values.square().sum(dtype=torch.float64))))

    def sample(self) -> Natural:
        """A few rows of what `pieces` gives, for their types and shapes."""
        if self.keeps and self.format not in DTYPES:
            return self.source.encoded(self.name, 0, min(self.rows, 256))
        return _blank(self.format, self.columns, self.scale_dtype)

    def _encoded(self, values: Tensor, largest: Tensor | None) -> Natural:
        try:
            if self.format in FORMATS:
                return encode(values, self.format, self.scale_dtype, largest)
            written = values.to(DTYPES[self.format])
            if not written.isfinite().all():
                raise ValueError(f"values are not finite in {written.dtype}")
            return written
        except ValueError as error:
            raise ModelError(f"{self.source.path}: {self.source.place(self.name)}: {error}") from None

    def _largest(self, reader: "_Reader", ranges: list[tuple[int, int]]) -> Tensor:
        """float32 [rows]: the greatest magnitude of the tensor, or of the expert that a row belongs to."""
        peaks = torch.cat([reader.values(first, last).abs().amax(1) for first, last in ranges])
        shape = self.source.shape(self.name)
        experts = shape[0] if len(shape) == 3 else 1
        return peaks.view(experts, -1).amax(1, keepdim=True).expand(experts, self.rows // experts).flatten()


@cache  # a mixture of experts has tens of thousands of equal ones
def _blank(format: str, columns: int, scale_dtype: torch.dtype | None) -> Natural:
    if format in DTYPES:
        return torch.empty((1, columns), dtype=DTYPES[format])
    return encode(torch.zeros(1, columns), format, scale_dtype)


class _Reader:
    """Rows of one tensor, on a device."""

    def __init__(self, source: QuantizedSource, name: str, rows: int, columns: int, device: torch.device) -> None:
        self._source, self._name, self._device = source, name, device
        self._whole: Tensor | None = None
        format = source.format(name)
        if format in DTYPES:
            whole = torch.empty(source.shape(name), dtype=DTYPES[format])
            source.read(name, whole)
            self._whole = whole.view(rows, columns)

    def natural(self, first: int, last: int) -> Natural:
        if self._whole is not None:
            return self._finite(self._whole[first:last].to(self._device))
        return moved(self._source.encoded(self._name, first, last), self._device)

    def values(self, first: int, last: int) -> Tensor:
        """float32."""
        return self._finite(decoded(self.natural(first, last)))

    def _finite(self, values: Tensor) -> Tensor:
        if values.numel():
            low, high = values.aminmax()
            if not (low.isfinite() and high.isfinite()):
                place = self._source.place(self._name)
                raise ModelError(f"{self._source.path}: {place} holds values that are not finite; expected numbers")
        return values
