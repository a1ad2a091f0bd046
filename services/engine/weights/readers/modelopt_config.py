"""What NVIDIA ModelOpt says: `quantization_config` of config.json, and hf_quant_config.json, either of which may say
less than the other."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from services.engine.model.config import ModelError
from services.engine.weights.readers.compressed_tensors_config import GroupsDeclaration, read_groups
from services.engine.weights.readers.scheme import Scheme, aliases

_NVFP4 = Scheme("float", 4, 16)
_FP8 = Scheme("float", 8)
_ALGORITHMS = {
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "W4A8_NVFP4_FP8": _NVFP4,
    "FP8": _FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": _FP8,
    "FP8_PB_WO": _FP8,
}
_MIXED = "MIXED_PRECISION"


@dataclass(frozen=True, slots=True)
class ModelOptDeclaration:
    """A `Declaration`."""

    scheme: Scheme | None
    """Of the modules that have none of their own."""
    layers: Mapping[str, Scheme]
    """By module, or by the name of a part of the model that holds it (`mlp.experts`)."""
    left_out: frozenset[str]
    """Names as those of `layers`,"""
    patterns: tuple[str, ...]
    """and with `*`."""
    method: str = "modelopt"
    zeros_less_one: bool = False

    def schemes(self, module: str) -> Sequence[Scheme]:
        names = aliases(module)
        holders = [holder for name in names for holder in _holders(name)]
        for holder in holders:
            if holder in self.layers:
                return (self.layers[holder],)
        if self.scheme is None or not self.left_out.isdisjoint(holders):
            return ()
        return () if any(fnmatchcase(name, pattern) for pattern in self.patterns for name in names) else (self.scheme,)


def read_modelopt(raw: Mapping[str, Any], beside: Mapping[str, Any]) -> ModelOptDeclaration | GroupsDeclaration:
    """`raw`: quantization_config; `beside`: `quantization` of hf_quant_config.json; either may be empty. Raises
    ModelError naming what we cannot honour."""
    algorithm = raw.get("quant_algo") or beside.get("quant_algo")
    listed = {**(beside.get("quantized_layers") or {}), **(raw.get("quantized_layers") or {})}
    if not listed and algorithm in (None, _MIXED):
        return GroupsDeclaration("modelopt", read_groups(raw), frozenset(raw.get("ignore") or ()))
    layers = {name: _scheme(entry.get("quant_algo"), f"quantized_layers.{name}") for name, entry in listed.items()}
    left_out = {*(raw.get("ignore") or ()), *(beside.get("exclude_modules") or ())}
    patterns = {name for name in left_out if "*" in name}
    scheme = None if algorithm in (None, _MIXED) else _scheme(algorithm, "quant_algo")
    return ModelOptDeclaration(scheme, layers, frozenset(left_out - patterns), tuple(sorted(patterns)))


def _scheme(algorithm: object, where: str) -> Scheme:
    if algorithm not in _ALGORITHMS:
        raise ModelError(
            f"quantization_config: {where} = {algorithm!r} is not supported; known: {', '.join(_ALGORITHMS)}"
        )
    return _ALGORITHMS[algorithm]


def _holders(name: str) -> Iterator[str]:
    """A module, and the parts of the model that hold it, from the inside out."""
    while name:
        yield name
        name = name.rpartition(".")[0]
