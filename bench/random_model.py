"""A decoder of the 27B's shape whose weights are random bits, made in the memory of its device: what the engine would
load by a recipe, format by format and block by block, in seconds and without a file."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bench.linear import random_weight
from bench.random_checkpoint import TEXT
from kernels.linear.packing import FP8
from kernels.linear.quantized import FORMATS, dequantize
from kernels.linear.weight import unpack
from services.engine.model.hybrid_config import HybridConfig, parse_hybrid_config
from services.engine.model.matrix import Block, Matrix, MatrixSlot, Place, joined
from services.engine.model.mtp import MtpHead
from services.engine.model.qwen3_5 import HybridDecoder
from services.engine.weights.artifact.names import is_matrix
from services.engine.weights.recipes import Recipe

LAYERS = 64
"""Of the 27B."""
SPREAD = 0.02
"""Standard deviation of the weights, whatever their format: a matrix of 5120 columns makes about 1.4 out of 1, so that
logits and states stay finite over any number of steps."""
_EMBEDDING = "model.embed_tokens.weight"
_SAMPLE = 1024
"""Rows and columns by which the deviation of a format's random bits is found."""


@dataclass(frozen=True, slots=True)
class RandomModel:
    model: HybridDecoder
    draft: MtpHead | None
    """The head for multi-token prediction, where the config has one."""
    read_bytes: int
    """Of the weights that a step reads, however few rows it has: all but the embedding, of which it takes single rows,
    unless that is the head too, and what drafts."""


def shape(layers: int = LAYERS) -> dict[str, Any]:
    """A `config.json` of the 27B's shape with so many layers."""
    return {**TEXT, "num_hidden_layers": layers}


@torch.inference_mode()
def random_model(raw: Mapping[str, Any], recipe: Recipe, dtype: torch.dtype, device: torch.device) -> RandomModel:
    """Weights are a function of `torch.manual_seed` and the device. Columns of the matrices must be whole units of
    their formats. Raises ModelError for a config that is not of the family, and what torch raises when the memory is
    not there."""
    config = parse_hybrid_config(raw)
    model = HybridDecoder(config, dtype, device)
    draft = MtpHead(model) if config.mtp else None
    read = _filled(model.slots(), recipe, config, dtype, device)
    if draft is not None:
        _filled(draft.slots(), recipe, config, dtype, device)
    model.prepare()
    return RandomModel(model, draft, read)


def _filled(
    places: Iterable[Place], recipe: Recipe, config: HybridConfig, dtype: torch.dtype, device: torch.device
) -> int:
    """Bytes that a step reads of them."""
    parts: dict[Matrix, list[MatrixSlot]] = {}
    read = 0
    for place in places:
        if isinstance(place, MatrixSlot):
            parts.setdefault(place.matrix, []).append(place)
        else:
            fill(place.name, place.target)
            read += place.target.nbytes
    for matrix, slots in parts.items():
        blocks: list[Block] = []
        for slot in sorted(slots, key=lambda slot: slot.first):
            format = recipe.rule(slot.name, len(config.layer_types)).format if is_matrix(slot.name) else "bf16"
            blocks.append(random_block(format, slot.rows, matrix.columns, dtype, device))
        matrix.bind(joined(blocks))
        if slots[0].name != _EMBEDDING or config.tied_head:
            read += sum(block.nbytes for block in matrix.blocks)
    return read


def fill(name: str, target: Tensor) -> None:
    """A tensor that no recipe quantizes, named as `transformers` names it: norms do nothing, decays are those of
    `bench.random_checkpoint`, the others random."""
    if name.endswith((".dt_bias", ".linear_attn.norm.weight")):
        target.fill_(1)
    elif name.endswith((".A_log", "norm.weight")):
        target.zero_()
    else:
        target.normal_(0, SPREAD)


def random_block(format: str, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Block:
    """Values around 0 of deviation SPREAD; plain in `dtype` where `format` is none of FORMATS."""
    if format not in FORMATS:
        return torch.empty(rows, columns, dtype=dtype, device=device).normal_(0, SPREAD)
    weight = random_weight(format, rows, columns, device)
    if format in FP8:  # random bits without a sign so far
        weight.codes.bitwise_or_(torch.randint(0, 2, weight.codes.shape, dtype=torch.uint8, device=device) << 7)
    factors = weight.scales if weight.row_scale is None else weight.row_scale
    assert factors is not None
    if FORMATS[format].integer:  # codes reach further below 0 than above it
        factors.mul_(torch.randint(0, 2, factors.shape, dtype=torch.int8, device=device) * 2 - 1)
    factors.mul_(SPREAD / _deviation(format))
    return weight


@lru_cache(maxsize=len(FORMATS))
def _deviation(format: str) -> float:
    """Of `random_weight`, about 0."""
    values = dequantize(unpack(random_weight(format, _SAMPLE, _SAMPLE, torch.device("cpu"))))
    return float(values.square().mean().sqrt())
