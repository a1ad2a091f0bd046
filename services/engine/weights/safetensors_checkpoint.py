"""A decoder in a folder of `transformers`: config.json and one or more safetensors files."""

import json
import logging
import mmap
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.linear.grouped.form import Grouped
from kernels.linear.quantized import Quantized
from services.engine.model.config import ModelError
from services.engine.model.family import DecoderConfig, parse_model_config
from services.engine.model.hybrid_config import HybridConfig
from services.engine.weights.checkpoint import WeightFile
from services.engine.weights.tokenizer import read_bundle, read_json
from services.protocol.events import TokenizerBundle

log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_FORMATS = {"F32": "float32", "F16": "float16", "BF16": "bf16"}
"""By the types that we read, as safetensors names them: as `QuantizedSource.format` names them."""
_WITHOUT_USE = ".rotary_emb.inv_freq"
"""Old checkpoints hold these; they follow from the config."""
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.": "",
    "model.mtp.": "mtp.",
}
"""Of the Qwen3.5 family: how multimodal files and some exports begin the names that text-only files have."""
_VISION = ("model.visual.", "visual.")
_MAPPED_AT_ONCE = 2**24
"""Bytes; larger tensors are read in pieces."""


class SafetensorsCheckpoint:
    """A `QuantizedSource` without any quantized tensor. Raises ModelError naming the file and the key or tensor that
    cannot be used."""

    READABLE = frozenset(_FORMATS)
    """The types that `read` converts, as safetensors names them."""

    def __init__(self, folder: Path, config: Mapping[str, Any] | None = None) -> None:
        """`config`: the folder's config.json without what the caller takes care of; None: as it is."""
        self._folder = folder
        self._raw = read_json(folder / "config.json") if config is None else config
        try:
            self._config = parse_model_config(self._raw)
        except ModelError as error:
            raise ModelError(f"{folder / 'config.json'}: {error}") from None
        self._paths = _weight_files(folder)
        self._opened = {path: _open(path) for path in self._paths}
        self._home = {
            self._canonical(name): (path, name)
            for path, opened in self._opened.items()
            for name in opened.keys()  # noqa: SIM118 (no mapping)
            if not name.endswith(_WITHOUT_USE)
        }
        if isinstance(self._config, HybridConfig):
            self._skip_vision()

    @property
    def path(self) -> Path:
        return self._folder

    @property
    def config(self) -> DecoderConfig:
        return self._config

    def names(self) -> Set[str]:
        return self._home.keys()

    def place(self, name: str) -> str:
        if name not in self._home:
            return f"tensor {name}"
        path, stored = self._home[name]
        return f"tensor {stored} of {path.name}"

    def shape(self, name: str) -> tuple[int, ...]:
        path, stored = self._home[name]
        return tuple(self._opened[path].get_slice(stored).get_shape())

    def kind(self, name: str) -> str:
        """The type of a tensor's elements, as safetensors names it: `BF16`, `F8_E4M3`."""
        path, stored = self._home[name]
        return self._opened[path].get_slice(stored).get_dtype()

    def raw(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        path, stored = self._home[name]
        return self._opened[path].get_tensor(stored)

    def cut(self, name: str, *ranges: slice) -> Tensor:
        """A part of a tensor as it is stored, by its first dims; only this is read."""
        path, stored = self._home[name]
        return self._opened[path].get_slice(stored)[ranges]

    def read(self, name: str, target: Tensor) -> None:
        self.format(name)
        path, stored = self._home[name]
        size = target.numel() * target.element_size()
        if size <= _MAPPED_AT_ONCE:
            target.copy_(self.raw(name))
            return
        rows = max(1, len(target) * _MAPPED_AT_ONCE // size)
        for first in range(0, len(target), rows):
            # A mapping of its own: the pages that it read count as the process's memory for as long as it lives.
            piece = _open(path).get_slice(stored)[first : first + rows]
            target[first : first + rows] = piece

    def format(self, name: str) -> str:
        kind = self.kind(name)
        if kind not in _FORMATS:
            path, stored = self._home[name]
            raise ModelError(f"{path}: tensor {stored} has the type {kind}; supported: {', '.join(_FORMATS)}")
        return _FORMATS[kind]

    def encoded(self, name: str, first: int, last: int) -> Quantized | Grouped:
        raise ModelError(f"{self._folder}: {self.place(name)} is not quantized")

    def files(self) -> Sequence[WeightFile]:
        return [_weight_file(path) for path in self._paths]

    def bundle(self) -> TokenizerBundle:
        return read_bundle(self._folder, self._raw)

    def _canonical(self, stored: str) -> str:
        """The name of a tensor in a text-only file."""
        if isinstance(self._config, HybridConfig):
            for prefix, short in _PREFIXES.items():
                if stored.startswith(prefix):
                    return short + stored.removeprefix(prefix)
        return stored

    def _skip_vision(self) -> None:
        vision = [name for name in self._home if name.startswith(_VISION)]
        for name in vision:
            del self._home[name]
        if vision:
            log.info("%s: %d tensors of the vision part are not loaded", self._folder, len(vision))


def _weight_files(folder: Path) -> list[Path]:
    """Sorted by name."""
    if (folder / _INDEX).exists():
        shards = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ModelError(f"{folder / _INDEX} has no weight_map")
        paths = [folder / name for name in sorted(set(shards.values()))]
    else:
        single = folder / "model.safetensors"
        paths = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder} holds no *.safetensors file")
    for path in paths:
        if not path.exists():
            raise ModelError(f"{path} is missing, but {_INDEX} names it")
    return paths


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is no whole safetensors file ({error}); download it again") from None


def _weight_file(path: Path) -> WeightFile:
    # `safe_open` has checked the header.
    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8:start]))
    places = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    return WeightFile(data, start, [(start + first, end - first) for first, end in sorted(places)])
