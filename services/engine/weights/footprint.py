"""Device memory that a model's weights will take, before they are loaded: from the headers of its files, and a row of
each quantized matrix for the types of its scales."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernels.linear import weight
from kernels.linear.grouped import launch as grouped_launch
from kernels.linear.grouped import weight as grouped
from kernels.linear.grouped.form import Grouped
from kernels.linear.grouped.weight import GroupedWeight
from kernels.linear.launch import tile_rows
from kernels.linear.quantized import FORMATS, FP8_BLOCK, Quantized
from kernels.linear.weight import Weight
from services.engine.model.hybrid_config import HybridConfig
from services.engine.model.matrix import Block, Matrix, MatrixSlot, Place, joined
from services.engine.weights.artifact.names import is_matrix
from services.engine.weights.codecs import encode
from services.engine.weights.loader import decoder_of
from services.engine.weights.recipes import KEEP, Recipe
from services.engine.weights.source import DENSE, GROUPED, QuantizedSource

_DRAFT = "mtp."
"""What the names of the head for multi-token prediction begin with."""
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Footprint:
    decoder: int
    """Bytes of the weights, as `bind` leaves them."""
    draft: int
    """Those of the head for multi-token prediction; 0 where there is none."""
    tile: int
    """The largest piece of a packed matrix that a product with many rows decodes at once, in the model's dtype."""

    @property
    def total(self) -> int:
        return self.decoder + self.draft


def footprint(source: QuantizedSource, dtype: torch.dtype, packed: bool, recipe: Recipe | None = None) -> Footprint:
    """As `load_checkpoint` would load `source` in `dtype`, its quantized weights `packed` or decoded; with `recipe` as
    it would load what `samovar pack` makes of it by that. Raises ModelError for a model that cannot be loaded."""
    _, _, places = decoder_of(source, dtype, torch.device("meta"), "auto")
    formats = _Formats(source, recipe)
    decoder, tile = _sum((place for place in places if not place.name.startswith(_DRAFT)), formats, dtype, packed)
    draft, draft_tile = _sum((place for place in places if place.name.startswith(_DRAFT)), formats, dtype, packed)
    return Footprint(decoder, draft, max(tile, draft_tile))


class _Formats:
    """What each tensor is stored as, or will be."""

    def __init__(self, source: QuantizedSource, recipe: Recipe | None) -> None:
        self._source, self._recipe = source, recipe
        config = source.config
        self._layers = len(config.layer_types) if isinstance(config, HybridConfig) else config.layers
        self._samples: dict[tuple[object, ...], Block] = {}

    def of(self, name: str) -> tuple[str, torch.dtype | None]:
        """The format, and the dtype of its scales where a recipe encodes it."""
        found = self._source.format(name)
        if self._recipe is None or not is_matrix(name):
            return found, None
        rule = self._recipe.rule(name, self._layers)
        if rule.format in (KEEP, found):
            return found, None
        return rule.format, getattr(torch, rule.scales) if rule.scales else torch.bfloat16

    def sample(self, part: MatrixSlot) -> Block:
        """Some rows of a quantized tensor as the kernels read them; as many as its last block of scales has for
        fp8-block, else one. Tensors that differ in their numbers only are taken to be alike but for GROUPED."""
        format, scales = self.of(part.name)
        rows = (part.rows % FP8_BLOCK or FP8_BLOCK) if format == "fp8-block" else 1
        kind = part.name if format == GROUPED else _NUMBER.sub("#", part.name)
        key = (kind, format, rows, part.matrix.columns)
        if key not in self._samples:
            if scales is not None:
                natural = _encoded(format, rows, part.matrix.columns, scales)
            else:
                natural = self._source.encoded(part.name, 0, rows)
            self._samples[key] = weight.pack(natural) if isinstance(natural, Quantized) else grouped.pack(natural)
        return self._samples[key]


@lru_cache(maxsize=256)
def _encoded(format: str, rows: int, columns: int, scales: torch.dtype) -> Quantized | Grouped:
    scaled = FORMATS[format].integer or format == "fp8-block"
    return encode(torch.zeros(rows, columns), format, scales if scaled else None)


def _sum(places: Iterable[Place], formats: _Formats, dtype: torch.dtype, packed: bool) -> tuple[int, int]:
    """Bytes of all places, and of the largest tile."""
    total = tile = 0
    matrices: dict[Matrix, list[MatrixSlot]] = {}
    for place in places:
        if isinstance(place, MatrixSlot):
            matrices.setdefault(place.matrix, []).append(place)
        else:
            total += place.target.nbytes
    for matrix, parts in matrices.items():
        nbytes, decoded = _matrix(matrix, parts, formats, dtype, packed)
        total, tile = total + nbytes, max(tile, decoded)
    return total, tile


def _matrix(
    matrix: Matrix, parts: Sequence[MatrixSlot], formats: _Formats, dtype: torch.dtype, packed: bool
) -> tuple[int, int]:
    dense = matrix.rows * matrix.columns * dtype.itemsize
    if not packed or all(formats.of(part.name)[0] in DENSE for part in parts):
        return dense, 0
    total = tile = 0
    samples: list[Block] = []
    for part in sorted(parts, key=lambda part: part.first):
        if formats.of(part.name)[0] in DENSE:
            total += part.rows * part.matrix.columns * dtype.itemsize
            samples.append(torch.empty(part.rows, part.matrix.columns, dtype=dtype, device="meta"))
            continue
        sample = formats.sample(part)
        assert not isinstance(sample, Tensor)
        samples.append(sample)
        total += _bytes(sample, part.rows)
        tile = max(tile, _tile(sample, part.rows, dtype))
    if matrix.whole and len(joined(samples)) > 1:
        return dense, 0  # of several formats: decoded, see `binding`
    return total, tile


def _bytes(sample: Weight | GroupedWeight, rows: int) -> int:
    """Of as many rows like those of the sample."""
    if isinstance(sample, Weight) and sample.format == "fp8-block":
        assert sample.scales is not None
        return sample.codes.nbytes // sample.rows * rows + sample.scales.nbytes * -(-rows // FP8_BLOCK)
    return sample.nbytes // sample.rows * rows


def _tile(sample: Weight | GroupedWeight, rows: int, dtype: torch.dtype) -> int:
    step = grouped_launch.TILE_ELEMENTS // sample.columns
    if isinstance(sample, Weight):
        step = tile_rows(sample.columns, dtype.itemsize)
    return min(rows, max(1, step)) * sample.columns * dtype.itemsize
