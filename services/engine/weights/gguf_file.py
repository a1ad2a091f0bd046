"""The GGUF container: metadata, the table of tensors, and their values.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Block types are
decoded by the `gguf` package. Its own reader is not used, as it makes a NumPy array of every string (2.7 s for 49,152
tokens on one core of an EPYC, against 0.2 s here) and says of a file cut short only that something cannot be reshaped.
"""

import mmap
import struct
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from services.engine.model.config import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Format letters of `struct` by GGUF's value type."""
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]
    """In torch's order (GGUF stores it reversed)."""
    kind: GGMLQuantizationType
    start: int
    """Bytes from the start of the file."""
    size: int
    """Bytes."""
    expert: int | None = None
    """Of a piece: which one of the stored tensor's."""

    def piece(self, expert: int) -> "GgufTensor":
        """One matrix of a tensor [experts, rows, columns]."""
        size = self.size // self.shape[0]
        return replace(self, shape=self.shape[1:], start=self.start + expert * size, size=size, expert=expert)


class _Cursor:
    """Reads forward through the header; running over the end is a ModelError that says inside of what."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0
        self.inside = "the header"

    def take(self, letters: str) -> tuple[Any, ...]:
        layout = struct.Struct("<" + letters)
        start = self._advance(layout.size)
        return layout.unpack_from(self.data, start)

    def number(self, letter: str) -> Any:
        return self.take(letter)[0]

    def string(self) -> str:
        length = self.number("Q")
        start = self._advance(length)
        # llama.cpp's converters store a token that is no whole UTF-8 sequence as it is.
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.take("IQ")
            if item in _SCALARS:
                self.require(count)  # before a format of a damaged count is built
                return list(self.take(f"{count}{_SCALARS[item]}"))
            return [self.value(item) for _ in range(count)]
        raise ModelError(f"{self.path}: {self.inside} has the unknown value type {kind}: a damaged or newer GGUF file")

    def require(self, size: int) -> None:
        if self.position + size > len(self.data):
            raise ModelError(
                f"{self.path}: the file ends inside {self.inside} (it has {len(self.data)} bytes): "
                "it is truncated; download it again"
            )

    def _advance(self, size: int) -> int:
        self.require(size)
        start = self.position
        self.position += size
        return start


class GgufFile:
    """A mapped file. Raises ModelError for anything that is no whole, readable GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = _map(path)
        cursor = _Cursor(path, self._data)
        if self._data[:4] != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: it starts with {self._data[:4]!r}, expected b'GGUF'")
        cursor.position = 4
        version = cursor.number("I")
        if version not in _VERSIONS:
            raise ModelError(f"{path} is GGUF version {version}; versions 2 and 3 (little-endian) can be read")
        tensor_count, entry_count = cursor.take("QQ")
        self.metadata: dict[str, Any] = {}
        for index in range(entry_count):
            cursor.inside = f"metadata entry {index + 1} of {entry_count}"
            key = cursor.string()
            cursor.inside = f"metadata {key}"
            self.metadata[key] = cursor.value(cursor.number("I"))
        if self.metadata.get("split.count", 1) > 1:
            raise ModelError(
                f"{path} is part of a split model of {self.metadata['split.count']} files; "
                "join them first: llama-gguf-split --merge"
            )
        table = [self._table_entry(cursor, index, tensor_count) for index in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        base = -(-cursor.position // alignment) * alignment
        self.header_bytes = cursor.position
        """Of metadata and tensor table, at the start of the file."""
        self.tensors = {tensor.name: tensor for tensor in (self._placed(base, *entry) for entry in table)}

    def bytes(self) -> memoryview:
        """The whole file."""
        return memoryview(self._data)

    def raw(self, tensor: GgufTensor) -> np.ndarray:
        """Its bytes as they lie in the file, a view."""
        return np.frombuffer(self._data, dtype=np.uint8, count=tensor.size, offset=tensor.start)

    def values(self, tensor: GgufTensor) -> Tensor:
        """All of a small tensor, float32 [rows, columns]."""
        return self.decode(tensor, self.raw(tensor).reshape(prod(tensor.shape[:-1]), -1))

    def decode(self, tensor: GgufTensor, rows: np.ndarray) -> Tensor:
        """Rows of the tensor, uint8 [rows, bytes], to float32 [rows, elements], never a view of the mapping. Raises
        ModelError for a type that the gguf package cannot decode."""
        try:
            return torch.tensor(dequantize(np.ascontiguousarray(rows), tensor.kind), dtype=torch.float32)
        except NotImplementedError:
            message = f"{self.path}: tensor {tensor.name} has the type {tensor.kind.name}, which cannot be read"
            raise ModelError(message) from None

    def _table_entry(self, cursor: _Cursor, index: int, count: int) -> tuple[str, tuple[int, ...], int, int]:
        cursor.inside = f"the table of tensors, entry {index + 1} of {count}"
        name = cursor.string()
        dims = cursor.number("I")
        if not 1 <= dims <= 4:
            raise ModelError(f"{self.path}: tensor {name} has {dims} dims; expected 1 to 4: the file is damaged")
        shape = cursor.take(f"{dims}Q")[::-1]
        kind, offset = cursor.take("IQ")
        return name, shape, kind, offset

    def _placed(self, base: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        try:
            known = GGMLQuantizationType(kind)
        except ValueError:
            raise ModelError(f"{self.path}: tensor {name} has the unknown type number {kind}") from None
        block, block_bytes = GGML_QUANT_SIZES[known]
        if shape[-1] % block or prod(shape) == 0:
            raise ModelError(f"{self.path}: tensor {name} of shape {list(shape)} is not made of {known.name} blocks")
        size = prod(shape) // block * block_bytes
        if base + offset + size > len(self._data):
            raise ModelError(
                f"{self.path}: tensor {name} should end at byte {base + offset + size}, but the file has "
                f"{len(self._data)} bytes: it is truncated; download it again"
            )
        return GgufTensor(name, shape, known, base + offset, size)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:  # mmap's word for an empty file
        raise ModelError(f"{path} is empty") from None
