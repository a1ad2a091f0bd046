"""Spans of a step, cut into tiles: what kernels over rows of different length start with."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kernels.state_plan import StatePlan


@dataclass(frozen=True, slots=True)
class Tiles:
    """On one device."""

    borders: Tensor
    """int64 [spans + 1]: span s is [borders[s], borders[s + 1]) of the packed tokens (`PackedSpans`)."""
    places: Tensor
    """int64 [tiles, 2]: the span, and which of its tiles; span by span, ascending."""


def tiles(plan: StatePlan, size: int, device: torch.device) -> Tiles:
    """The spans of `plan`, `size` tokens a tile; no tile holds tokens of two spans. Equal spans get the same tensors
    again, so that all layers of a step share them, and flash-linear-attention, which knows a tensor by its identity,
    makes what it derives from them only once. Nobody may write to them."""
    return _tiles(tuple(span.count for span in plan.spans), size, device)


@lru_cache(maxsize=16)
def _tiles(counts: tuple[int, ...], size: int, device: torch.device) -> Tiles:
    lengths = torch.tensor(counts, dtype=torch.int64)
    of_span = (lengths + size - 1) // size
    spans = torch.arange(len(counts)).repeat_interleave(of_span)
    tile = torch.arange(len(spans)) - (of_span.cumsum(0) - of_span)[spans]
    return Tiles(
        borders=torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(device),
        places=torch.stack((spans, tile), dim=1).to(device),
    )
