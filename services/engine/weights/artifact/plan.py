"""What a pack run writes: every tensor's format, the groups, and the shards that they go to."""

import hashlib
from collections import defaultdict
from dataclasses import dataclass

import msgspec
import torch

from services.engine.model.hybrid_config import HybridConfig
from services.engine.weights.artifact import names
from services.engine.weights.artifact.form import Field, Form, stored
from services.engine.weights.artifact.manifest import VERSION, Group, Part
from services.engine.weights.artifact.rows import Conversion
from services.engine.weights.recipes import KEEP, Recipe
from services.engine.weights.source import QuantizedSource

SHARD_BYTES = 4 * 2**30
_BLOCK_ROWS = 128
"""A part of fp8-block must begin at a multiple of it to share a group."""


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    group: Group
    form: Form
    fields: dict[str, Field]
    """By the names that they have in the shard."""
    conversions: tuple[Conversion, ...]
    """Of its parts, in their order."""

    @property
    def elements(self) -> int:
        return self.group.rows * self.group.columns


@dataclass(frozen=True, slots=True)
class Plan:
    groups: tuple[PlannedGroup, ...]
    shards: int

    def digest(self) -> str:
        """Of names, shapes and formats; the values of the source are not looked at."""
        content = (VERSION, [planned.group for planned in self.groups])
        return hashlib.blake2b(msgspec.json.encode(content), digest_size=16).hexdigest()

    @property
    def elements(self) -> int:
        return sum(planned.elements for planned in self.groups)


def plan(source: QuantizedSource, recipe: Recipe, shard_bytes: int = SHARD_BYTES) -> Plan:
    """Raises ModelError when a tensor can be neither kept nor converted."""
    config = source.config
    layers = len(config.layer_types) if isinstance(config, HybridConfig) else config.layers
    fused: dict[str, list[Conversion]] = defaultdict(list)
    for name in sorted(source.names(), key=names.in_order):
        fused[names.fused(name)[0]].append(_conversion(source, name, recipe, layers))
    groups: list[PlannedGroup] = []
    shard = size = 0
    for name, conversions in fused.items():
        conversions.sort(key=lambda conversion: names.fused(conversion.name)[1])
        for planned_name, parts in _together(name, conversions):
            planned = _group(planned_name, parts)
            nbytes = sum(field.nbytes for field in planned.fields.values())
            if size and size + nbytes > shard_bytes:
                shard, size = shard + 1, 0
            size += nbytes
            group = msgspec.structs.replace(planned.group, shard=shard, nbytes=nbytes)
            groups.append(PlannedGroup(group, planned.form, planned.fields, planned.conversions))
    return Plan(tuple(groups), shard + 1)


def _conversion(source: QuantizedSource, name: str, recipe: Recipe, layers: int) -> Conversion:
    found = source.format(name)
    rule = recipe.rule(name, layers)
    if not names.is_matrix(name) or rule.format in (KEEP, found):
        return Conversion(source, name, found)
    return Conversion(source, name, rule.format, getattr(torch, rule.scales) if rule.scales else None)


def _together(name: str, parts: list[Conversion]) -> list[tuple[str, list[Conversion]]]:
    """The parts as one group where all lie alike, else each by itself."""
    kinds = []
    for part in parts:
        sample = part.sample()
        tensors = stored(sample)
        kinds.append((Form.of(sample, part.format), {field: tensor.dtype for field, tensor in tensors.items()}))
    whole = all(kind == kinds[0] for kind in kinds)
    if whole and parts[0].format == "fp8-block":
        whole = all(part.rows % _BLOCK_ROWS == 0 for part in parts[:-1])
    return [(name, parts)] if whole else [(names.alone(part.name), [part]) for part in parts]


def _group(name: str, conversions: list[Conversion]) -> PlannedGroup:
    first = conversions[0]
    sample = first.sample()
    form = Form.of(sample, first.format)
    parts, rows = [], 0
    for conversion in conversions:
        parts.append(Part(conversion.name, conversion.source.shape(conversion.name), rows))
        rows += conversion.rows
    group = Group(name, first.format, rows, first.columns, 0, tuple(parts), layout=form.layout)
    fields = {f"{name}.{field}": spec for field, spec in form.fields(stored(sample), rows).items()}
    return PlannedGroup(group, form, fields, tuple(conversions))
