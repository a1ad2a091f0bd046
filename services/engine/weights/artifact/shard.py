"""A safetensors file of known content: written in place, in any order, and read, both by mapping it.

Format: https://github.com/huggingface/safetensors#format.
"""

import hashlib
import json
import mmap
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from services.engine.model.config import ModelError
from services.engine.weights.artifact.form import Field
from services.engine.weights.checkpoint import WeightFile

_KINDS = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in _KINDS.items()}
_HASHED_AT_ONCE = 2**24


def layout(fields: Mapping[str, Field]) -> tuple[bytes, dict[str, int]]:
    """The file's beginning, and where each tensor starts behind it. Wide elements come first, so that all are aligned
    without gaps, which the format forbids."""
    places, header, end = {}, {}, 0
    for name in sorted(fields, key=lambda name: -fields[name].dtype.itemsize):
        field = fields[name]
        places[name] = end
        end += field.nbytes
        header[name] = {"dtype": _NAMES[field.dtype], "shape": field.shape, "data_offsets": [places[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


class ShardWriter:
    """A file made in its full size, or one that an earlier run made; `tensors` are views of it."""

    def __init__(self, path: Path, fields: Mapping[str, Field]) -> None:
        """Raises OSError, also when the disk has no room for all of it."""
        header, places = layout(fields)
        size = len(header) + sum(field.nbytes for field in fields.values())
        with path.open("r+b" if path.exists() else "w+b") as file:
            # Else a full disk would end the process at some write to the mapping.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self._map[: len(header)] = header
        self._places = {name: (len(header) + start, fields[name].nbytes) for name, start in places.items()}
        self.tensors = {name: _view(self._map, fields[name], start) for name, (start, _) in self._places.items()}

    def release(self, name: str) -> None:
        """A tensor is written: its pages need no longer be in this process's memory."""
        _release(self._map, *self._places[name])

    def sync(self) -> None:
        """Wait until all is on the disk."""
        self._map.flush()


class ShardReader:
    """Raises ModelError for a file that is not whole."""

    def __init__(self, path: Path, size: int) -> None:
        """`size`: that the file should have."""
        self.path = path
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno()).st_size
                if found != size:
                    raise ModelError(f"{path} has {found} bytes; expected {size}: it is truncated or not ours")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise ModelError(f"{path} is missing") from None
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None
        try:
            self._start = 8 + int.from_bytes(self._map[:8], "little")
            self._groups: dict[str, dict[str, tuple[Field, int]]] = defaultdict(dict)
            for name, entry in json.loads(self._map[8 : self._start]).items():
                group, _, field = name.rpartition(".")
                start = self._start + entry["data_offsets"][0]
                self._groups[group][field] = Field(_KINDS[entry["dtype"]], tuple(entry["shape"])), start
        except (ValueError, KeyError, TypeError):
            raise ModelError(f"{path} is damaged: its header cannot be read") from None
        if any(start + field.nbytes > size for field, start in self._places()):
            raise ModelError(f"{path} is damaged: its header names bytes behind its end")

    def tensors(self, group: str) -> dict[str, Tensor]:
        """Of a group by field, as views of the mapping. Raises ModelError when it has none here."""
        if group not in self._groups:
            raise ModelError(f"{self.path}: group {group} is missing")
        return {name: _view(self._map, field, start) for name, (field, start) in self._groups[group].items()}

    def release(self, group: str) -> None:
        """As `ShardWriter.release`; what is read again comes from the file again."""
        for field, start in self._groups[group].values():
            _release(self._map, start, field.nbytes)

    def _places(self) -> Iterator[tuple[Field, int]]:
        for fields in self._groups.values():
            yield from fields.values()

    def checksum(self) -> str:
        """BLAKE2b of the whole file, 64 hex digits."""
        return checksum(self.path)

    def weight_file(self) -> WeightFile:
        places = [(start, field.nbytes) for field, start in self._places()]
        return WeightFile(memoryview(self._map), self._start, sorted(places))


def checksum(path: Path) -> str:
    """BLAKE2b, 64 hex digits. Reads from the disk what nobody else has in use."""
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while piece := file.read(_HASHED_AT_ONCE):
            digest.update(piece)
    return digest.hexdigest()


def _release(data: mmap.mmap, start: int, size: int) -> None:
    if hasattr(mmap, "MADV_DONTNEED"):
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        data.madvise(mmap.MADV_DONTNEED, first, start + size - first)


def _view(data: mmap.mmap, field: Field, start: int) -> Tensor:
    count = prod(field.shape)
    if not count:
        return torch.empty(field.shape, dtype=field.dtype)
    return torch.frombuffer(data, dtype=field.dtype, count=count, offset=start).view(field.shape)
