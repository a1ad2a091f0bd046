"""A folder of `transformers` with quantized weights in the layout of some other tool."""

import logging
from collections.abc import Sequence, Set
from math import prod
from pathlib import Path

from torch import Tensor

from kernels.linear.grouped.form import Grouped
from kernels.linear.quantized import FP8_BLOCK, Quantized
from services.engine.model.config import ModelError
from services.engine.model.family import DecoderConfig
from services.engine.weights.checkpoint import WeightFile
from services.engine.weights.readers.layouts import open_encoding
from services.engine.weights.readers.modules import contents
from services.engine.weights.readers.parts import Matrix
from services.engine.weights.readers.scheme import Declaration
from services.engine.weights.safetensors_checkpoint import SafetensorsCheckpoint
from services.protocol.events import TokenizerBundle

log = logging.getLogger(__name__)

_PIECE = 2**22
"""Elements decoded at once: 16 MiB in float32, and about four times that with codes and scales."""


class QuantizedCheckpoint:
    """A `QuantizedSource`. Raises ModelError naming the file and the tensor that cannot be used."""

    def __init__(self, stored: SafetensorsCheckpoint, declaration: Declaration) -> None:
        self._stored = stored
        found = contents(stored)
        if not found.quantized:
            raise ModelError(
                f"{stored.path / 'config.json'}: the quantization_config names {declaration.method} weights, but no "
                "tensor is quantized"
            )
        self._matrices = {matrix.name: matrix for matrix in found.quantized}
        opened = {name: open_encoding(matrix, declaration) for name, matrix in self._matrices.items()}
        self._encodings = {name: encoding for name, (encoding, _) in opened.items()}
        self._names = self._encodings.keys() | set(found.plain)
        log.info("%s: %d tensors are quantized (%s)", stored.path, len(opened), declaration.method)
        if found.unused:
            log.info(
                "%s: %d scales of activations or of a quantized KV cache are not used", stored.path, len(found.unused)
            )
        unnamed = [name for name, (_, named) in opened.items() if not named]
        if unnamed:
            log.warning(
                "%s: %d tensors are quantized although the quantization_config leaves them out (%s); read as stored",
                stored.path,
                len(unnamed),
                unnamed[0],
            )

    @property
    def path(self) -> Path:
        return self._stored.path

    @property
    def config(self) -> DecoderConfig:
        return self._stored.config

    def names(self) -> Set[str]:
        return self._names

    def place(self, name: str) -> str:
        return self._stored.place(_main(self._matrices[name]) if name in self._matrices else name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._encodings[name].shape if name in self._encodings else self._stored.shape(name)

    def format(self, name: str) -> str:
        return self._encodings[name].format if name in self._encodings else self._stored.format(name)

    def encoded(self, name: str, first: int, last: int) -> Quantized | Grouped:
        if name not in self._encodings:
            return self._stored.encoded(name, first, last)
        return self._encodings[name].encoded(first, last)

    def read(self, name: str, target: Tensor) -> None:
        if name not in self._encodings:
            self._stored.read(name, target)
            return
        encoding = self._encodings[name]
        columns = encoding.shape[-1]
        rows = prod(encoding.shape[:-1])
        flat = target if target.dim() == 2 else target.view(rows, columns)
        step = max(FP8_BLOCK, _PIECE // columns // FP8_BLOCK * FP8_BLOCK)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            flat[first:last] = encoding.decoded(first, last)

    def files(self) -> Sequence[WeightFile]:
        return self._stored.files()

    def bundle(self) -> TokenizerBundle:
        return self._stored.bundle()


def _main(matrix: Matrix) -> str:
    """The stored tensor that stands for a matrix in messages."""
    parts = matrix.parts
    role = next((role for role in ("weight", "weight_packed", "qweight") if role in parts), next(iter(parts)))
    return parts[role].name
