"""Configs with one scheme for all modules but some: block FP8, AWQ, GPTQ, AutoRound."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.engine.model.config import ModelError
from services.engine.weights.readers.scheme import Scheme, aliases

_AUTO_ROUND_GPTQ = {"auto_round:auto_gptq": True, "auto_round:gptqmodel": False, "auto_round": False}
"""By packing_format: zero points with 1 subtracted or not."""
_AUTO_ROUND_AWQ = "auto_round:auto_awq"


@dataclass(frozen=True, slots=True)
class UniformDeclaration:
    """A `Declaration`."""

    method: str
    scheme: Scheme
    left_out: tuple[str, ...] = ()
    """`.NAME.` of each module or part of the model that is not quantized; the pieces before it may be missing."""
    zeros_less_one: bool = False

    def schemes(self, module: str) -> Sequence[Scheme]:
        names = f".{'. .'.join(aliases(module))}."
        return () if any(part in names for part in self.left_out) else (self.scheme,)


def read_fp8(raw: Mapping[str, Any]) -> UniformDeclaration:
    """Raises ModelError naming the key that we cannot honour."""
    block = raw.get("weight_block_size")
    if block is not None and not (isinstance(block, list) and len(block) == 2 and all(_positive(n) for n in block)):
        raise ModelError(f"quantization_config.weight_block_size = {block!r}; expected two positive numbers, or none")
    left_out = raw.get("modules_to_not_convert") or raw.get("ignored_layers") or ()
    return UniformDeclaration("fp8", Scheme("float", 8, block=tuple(block) if block else None), _enclosed(left_out))


def read_awq(raw: Mapping[str, Any]) -> UniformDeclaration:
    version = str(raw.get("version", "gemm")).lower()
    if version != "gemm":
        raise ModelError(f"quantization_config.version = {raw['version']!r} of AWQ is not supported; supported: gemm")
    return _integers("awq", raw, 4)


def read_gptq(raw: Mapping[str, Any]) -> UniformDeclaration:
    form = raw.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise ModelError(f"quantization_config.checkpoint_format = {form!r} is not supported; known: gptq, gptq_v2")
    return _integers("gptq", raw, None, zeros_less_one=form == "gptq")


def read_auto_round(raw: Mapping[str, Any]) -> UniformDeclaration:
    form = raw.get("packing_format")
    if form == _AUTO_ROUND_AWQ:
        return _integers("auto-round", raw, 4)
    if form in _AUTO_ROUND_GPTQ:
        return _integers("auto-round", raw, None, zeros_less_one=_AUTO_ROUND_GPTQ[form])
    known = ", ".join((*_AUTO_ROUND_GPTQ, _AUTO_ROUND_AWQ))
    raise ModelError(f"quantization_config.packing_format = {form!r} is not supported; known: {known}")


def _integers(
    method: str, raw: Mapping[str, Any], only: int | None, zeros_less_one: bool = False
) -> UniformDeclaration:
    bits, group = raw.get("bits", raw.get("w_bit")), raw.get("group_size", raw.get("q_group_size"))
    if not _positive(bits) or (only is not None and bits != only):
        raise ModelError(f"quantization_config.bits = {bits!r} of {method} is not supported")
    if group is not None and group != -1 and not _positive(group):
        raise ModelError(f"quantization_config.group_size = {group!r}; expected a positive number, or -1")
    # With settings of their own for some modules, each module's tensors say what it is.
    mixed = raw.get("dynamic") or raw.get("extra_config")
    scheme = Scheme("int") if mixed else Scheme("int", bits, group if group != -1 else None)
    return UniformDeclaration(method, scheme, _enclosed(raw.get("modules_to_not_convert") or ()), zeros_less_one)


def _enclosed(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f".{name.strip('.')}." for name in names)


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
