"""The `quantization_config` of compressed-tensors: groups of modules, each with a scheme."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.engine.model.config import ModelError
from services.engine.weights.readers.scheme import Scheme, aliases

_FORMATS = (
    "nvfp4-pack-quantized",
    "float-quantized",
    "naive-quantized",
    "int-quantized",
    "pack-quantized",
    "mixed-precision",
    "dense",
)
_REGEX = "re:"


@dataclass(frozen=True, slots=True)
class Group:
    targets: tuple[str, ...]
    """Names of modules, `re:` and a regular expression for the start of one, or names of classes."""
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class GroupsDeclaration:
    """A `Declaration`."""

    method: str
    groups: tuple[Group, ...]
    ignore: frozenset[str] = frozenset()
    """Targets as those of a group."""
    zeros_less_one: bool = False

    def schemes(self, module: str) -> Sequence[Scheme]:
        """In the order of compressed-tensors itself: exact names over all groups, regular expressions in the order of
        their text, classes."""
        names, kind = aliases(module), _class_of(module)
        if not self.ignore.isdisjoint((*names, kind)):
            return ()
        if any(_rank(target, names, kind) is not None for target in self.ignore if target.startswith(_REGEX)):
            return ()
        found = [
            (rank, target, place)
            for place, group in enumerate(self.groups)
            for target in group.targets
            if (rank := _rank(target, names, kind)) is not None
        ]
        return [self.groups[place].scheme for _, _, place in sorted(found)]


def read_compressed_tensors(raw: Mapping[str, Any]) -> GroupsDeclaration:
    """Raises ModelError naming the key that we cannot honour."""
    if (raw.get("sparsity_config") or {}).get("format") not in (None, "dense"):
        raise ModelError(f"quantization_config.sparsity_config = {raw['sparsity_config']!r} is not supported")
    if (raw.get("transform_config") or {}).get("config_groups"):
        raise ModelError("quantization_config.transform_config is not supported: it rotates what layers read")
    groups = read_groups(raw)
    for name, group in (raw.get("config_groups") or {}).items():
        form = group.get("format") or raw.get("format")
        if form is not None and form not in _FORMATS:
            raise ModelError(
                f"quantization_config: the format {form!r} of {name} is not supported; known: {', '.join(_FORMATS)}"
            )
    return GroupsDeclaration("compressed-tensors", groups, frozenset(raw.get("ignore") or ()))


def read_groups(raw: Mapping[str, Any]) -> tuple[Group, ...]:
    """The `config_groups`. Raises ModelError naming what cannot be read."""
    configured = raw.get("config_groups")
    if not isinstance(configured, Mapping) or not configured:
        raise ModelError(f"quantization_config.config_groups = {configured!r}; expected groups of modules")
    groups = []
    for name, group in configured.items():
        where = f"quantization_config.config_groups.{name}"
        if not isinstance(group, Mapping) or not isinstance(group.get("targets"), list):
            raise ModelError(f"{where} has no list of targets")
        weights = group.get("weights")
        if weights is None:  # only activations or the KV cache
            continue
        for target in group["targets"]:
            _check_regex(target, where)
        groups.append(Group(tuple(group["targets"]), _scheme(weights, where)))
    for target in raw.get("ignore") or ():
        _check_regex(target, "quantization_config.ignore")
    return tuple(groups)


def _scheme(weights: Mapping[str, Any], where: str) -> Scheme:
    kind, bits = weights.get("type", "int"), weights.get("num_bits")
    if kind not in ("int", "float") or not isinstance(bits, int) or not 1 <= bits <= 8:
        raise ModelError(f"{where}.weights: {bits!r} bits of the type {kind!r} are not supported")
    group, block = weights.get("group_size"), weights.get("block_structure")
    if isinstance(block, str):  # "128x128", of older files
        block = [int(size) for size in re.findall(r"\d+", block)]
    return Scheme(
        kind,
        bits,
        group if isinstance(group, int) and group > 0 else None,
        (block[0], block[1]) if isinstance(block, list) and len(block) == 2 else None,
        weights.get("symmetric", True),
    )


def _check_regex(target: object, where: str) -> None:
    if not isinstance(target, str):
        raise ModelError(f"{where}: the target {target!r} is no text")
    if target.startswith(_REGEX):
        try:
            re.compile(target.removeprefix(_REGEX))
        except re.error as error:
            raise ModelError(f"{where}: the target {target!r} is no regular expression: {error}") from None


def _rank(target: str, names: Sequence[str], kind: str) -> int | None:
    """How closely a target fits: 0 by name, 1 by a regular expression, 2 by class; None if it does not."""
    if target in names:
        return 0
    if target.startswith(_REGEX):
        pattern = target.removeprefix(_REGEX)
        return 1 if any(re.match(pattern, name) for name in names) else None
    return 2 if target == kind else None


def _class_of(module: str) -> str:
    return "Embedding" if module.endswith("embed_tokens") else "Linear"
