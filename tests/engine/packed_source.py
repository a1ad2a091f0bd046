"""A checkpoint that quantizes another one's matrices while they are read."""

from collections.abc import Callable, Sequence, Set
from pathlib import Path

import torch
from torch import Tensor

from kernels.linear.grouped import form
from kernels.linear.grouped.form import Grouped, Layout
from kernels.linear.quantized import Quantized, dequantize
from services.engine.model.family import DecoderConfig
from services.engine.weights.checkpoint import Checkpoint, WeightFile
from services.engine.weights.codecs import encode
from services.engine.weights.source import GROUPED
from services.protocol.events import TokenizerBundle

FormatOf = Callable[[str], str]
"""By a tensor's name: a key of FORMATS, GROUPED, or "float32" for what is to stay."""


class EncodedSource:
    """A `QuantizedSource`."""

    def __init__(self, inner: Checkpoint, format_of: FormatOf) -> None:
        self._inner = inner
        self._format_of = format_of
        self._encoded: dict[str, Quantized | Grouped] = {}

    @property
    def path(self) -> Path:
        return self._inner.path

    @property
    def config(self) -> DecoderConfig:
        return self._inner.config

    def names(self) -> Set[str]:
        return self._inner.names()

    def place(self, name: str) -> str:
        return self._inner.place(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(name)

    def read(self, name: str, target: Tensor) -> None:
        if self.format(name) == "float32":
            self._inner.read(name, target)
        else:
            whole = self._whole(name)
            values = form.dequantize(whole) if isinstance(whole, Grouped) else dequantize(whole)
            target.copy_(values.view(target.shape))

    def format(self, name: str) -> str:
        return self._format_of(name)

    def encoded(self, name: str, first: int, last: int) -> Quantized | Grouped:
        whole = self._whole(name)
        if isinstance(whole, Grouped):
            mins = None if whole.mins is None else whole.mins[first:last]
            return Grouped(whole.layout, whole.codes[first:last], whole.scales[first:last], mins=mins)
        scales = whole.scales
        if scales is not None:
            scales = scales[first // 128 : -(-last // 128)] if whole.format == "fp8-block" else scales[first:last]
        row_scale = None if whole.row_scale is None else whole.row_scale[first:last]
        return Quantized(whole.format, whole.codes[first:last], scales, row_scale)

    def files(self) -> Sequence[WeightFile]:
        return self._inner.files()

    def bundle(self) -> TokenizerBundle:
        return self._inner.bundle()

    def _whole(self, name: str) -> Quantized | Grouped:
        if name not in self._encoded:
            shape = self._inner.shape(name)
            values = torch.empty(shape)
            self._inner.read(name, values)
            rows = values.view(-1, shape[-1])
            format = self._format_of(name)
            self._encoded[name] = quarters(rows) if format == GROUPED else encode(rows, format)
        return self._encoded[name]


def quarters(values: Tensor) -> Grouped:
    """4-bit codes from each group's least value to its greatest, by 32 columns."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % 32)).view(rows, -1, 32)
    low, high = padded.amin(-1), padded.amax(-1)
    scales = ((high - low) / 15).half()
    mins = (-low).half()
    codes = ((padded + mins.float()[..., None]) / scales.float()[..., None].clamp(min=1e-8)).round().clamp(0, 15)
    return Grouped(Layout(4, 32, 32), codes.to(torch.uint8).flatten(1)[:, :columns].contiguous(), scales, mins=mins)
