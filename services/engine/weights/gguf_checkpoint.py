"""A decoder in a GGUF file: its config, tensors and tokenizer under llama.cpp's names."""

from collections.abc import Sequence, Set
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from kernels.linear.grouped.form import Grouped
from kernels.linear.quantized import FORMATS, Quantized
from services.engine.model.config import ModelError
from services.engine.model.family import DecoderConfig
from services.engine.weights import gguf_blocks, gguf_grids
from services.engine.weights.checkpoint import WeightFile
from services.engine.weights.gguf_config import parse_config
from services.engine.weights.gguf_file import GgufFile, GgufTensor
from services.engine.weights.gguf_names import Stored, placed, scale_name, stored_name
from services.engine.weights.gguf_order import gather, movable, move_columns
from services.engine.weights.gguf_tokenizer import read_bundle
from services.engine.weights.source import GROUPED
from services.protocol.events import TokenizerBundle

_DECODERS = {**gguf_blocks.DECODERS, **gguf_grids.DECODERS}
_DENSE = {Kind.F32: "float32", Kind.F16: "float16", Kind.BF16: "bf16"}
_INTEGER = {Kind.Q8_0: "int8-g32", Kind.NVFP4: "nvfp4"}
"""Types that formats of ours hold."""
_DECODED = "float32"
"""What `format` says of a quantized tensor whose codes cannot be given as they are."""
_CHUNK_ELEMENTS = 2**24
"""Decoded at once: 64 MiB of float32."""


class GgufCheckpoint:
    """A `QuantizedSource`. Raises ModelError naming the file and the key or tensor that cannot be used."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        try:
            self._config = parse_config(self._file)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None
        self._stored = placed(self._file.tensors, self._config)

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def config(self) -> DecoderConfig:
        return self._config

    def names(self) -> Set[str]:
        return self._stored.keys()

    def place(self, name: str) -> str:
        if name not in self._stored:
            return f"tensor {stored_name(name, self._config)}"
        return f"tensor {' and '.join(part.name for part in self._stored[name].parts)}"

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def read(self, name: str, target: Tensor) -> None:
        stored = self._stored[name]
        entries, columns = stored.shape[0], prod(stored.shape[1:])
        rows = stored.row_count // entries  # of an entry: more than one where experts are stacked
        step = max(1, _CHUNK_ELEMENTS // columns)
        for first in range(0, entries, step):
            last = min(entries, first + step)
            values = self._file.decode(stored.parts[0], self._raw(stored, first * rows, last * rows))
            if (scales := self._scales(stored, first * rows, last * rows)) is not None:
                values *= scales[:, None]
            if stored.columns is not None:
                values = values[:, torch.from_numpy(stored.columns(np.arange(values.shape[1])))]
            if stored.change == "1 + w":
                values -= 1
            elif stored.change == "-exp(w)":
                values = values.neg().log()
            target[first:last] = values.view(last - first, *stored.shape[1:])

    def format(self, name: str) -> str:
        stored = self._stored[name]
        kind = stored.parts[0].kind
        if kind in _DENSE:
            return _DENSE[kind]
        if kind not in _DECODERS or len(stored.shape) == 1 or stored.change != "none":
            return _DECODED
        known = _INTEGER.get(kind, GROUPED)
        if stored.columns is None:
            return known
        natural = self._natural(stored, 0, 1)
        group = natural.layout.group if isinstance(natural, Grouped) else FORMATS[known].group
        return known if movable(group, stored.columns, isinstance(natural, Grouped)) else _DECODED

    def encoded(self, name: str, first: int, last: int) -> Quantized | Grouped:
        if self.format(name) not in (*_INTEGER.values(), GROUPED):
            raise ModelError(f"{self.path}: {self.place(name)} has no codes that can be given")
        stored = self._stored[name]
        natural = self._natural(stored, first, last)
        if stored.columns is not None:
            natural = move_columns(natural, stored.columns)
        if isinstance(natural, Quantized) and (scales := self._scales(stored, first, last)) is not None:
            natural = replace(natural, row_scale=scales)
        return natural

    def files(self) -> Sequence[WeightFile]:
        tensors = [(tensor.start, tensor.size) for tensor in self._file.tensors.values()]
        return [WeightFile(self._file.bytes(), self._file.header_bytes, tensors)]

    def bundle(self) -> TokenizerBundle:
        try:
            return read_bundle(self._file.metadata)
        except ModelError as error:
            raise ModelError(f"{self.path}: {error}") from None

    def _natural(self, stored: Stored, first: int, last: int) -> Quantized | Grouped:
        """As the file has it, but for the order of rows."""
        kind = stored.parts[0].kind
        raw = torch.from_numpy(np.array(self._raw(stored, first, last)))
        return _DECODERS[kind](raw.view(last - first, -1, GGML_QUANT_SIZES[kind][1]))

    def _raw(self, stored: Stored, first: int, last: int) -> np.ndarray:
        """uint8 [last - first, bytes of a row], in our order of rows."""
        rows = stored.row_count // len(stored.parts)
        if stored.parts[0].size % rows:  # a vector in blocks
            part = stored.parts[0]
            raise ModelError(
                f"{self.path}: tensor {part.name} of shape {list(part.shape)} has the type {part.kind.name}"
            )
        parts = [self._file.raw(part).reshape(rows, -1) for part in stored.parts]
        return gather(parts, stored.rows, first, last)

    def _scales(self, stored: Stored, first: int, last: int) -> Tensor | None:
        """float32 [last - first] of NVFP4, whose tensors have a scale beside them."""
        if stored.parts[0].kind != Kind.NVFP4:
            return None
        rows = stored.row_count // len(stored.parts)
        wanted = np.arange(first, last)
        order = wanted if stored.rows is None else stored.rows(wanted)
        return torch.cat([self._scale(part, rows) for part in stored.parts])[torch.from_numpy(order)]

    def _scale(self, part: GgufTensor, rows: int) -> Tensor:
        """float32 [rows]; the file has one for a tensor, or one for each expert."""
        beside = self._file.tensors.get(scale_name(part.name))
        if beside is None:
            return torch.ones(rows)
        scales = self._file.values(beside).flatten()
        if part.expert is not None and len(scales) > 1:
            scales = scales[part.expert : part.expert + 1]
        if rows % len(scales):
            raise ModelError(f"{self.path}: tensor {beside.name} has {len(scales)} scales for {rows} rows")
        return scales.repeat_interleave(rows // len(scales))
