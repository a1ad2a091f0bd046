"""What llama.cpp's converter moves inside of tensors, as the way back.

An order is asked for places of the original and answers where the file has them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, prod
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from kernels.linear.grouped.form import Grouped, Layout
from kernels.linear.quantized import FORMATS, Quantized

Order: TypeAlias = Callable[[np.ndarray], np.ndarray]
"""int64 numbers of rows or columns of the original -> those of the file."""

_SMALLEST_GROUP = 16


@dataclass(frozen=True, slots=True)
class Halves:
    """Of q and k of the llama architecture. llama.cpp rotates neighbours, `transformers` and our kernel the two halves
    of a head: rows of a head lie as 0, D/2, 1, D/2 + 1, ... (`LlamaModel.permute` of the converter)."""

    head_dim: int

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        head, dim = np.divmod(rows, self.head_dim)
        side, pair = np.divmod(dim, self.head_dim // 2)
        return head * self.head_dim + 2 * pair + side


@dataclass(frozen=True, slots=True)
class Tiled:
    """Of value heads: value head k * ratio + j uses key head k, and lies as number j * key_heads + k, so that ggml can
    repeat the key heads as a whole (`_LinearAttentionVReorderBase` of the converter)."""

    key_heads: int
    ratio: int
    width: int
    """Rows or columns of a head."""
    first: int = 0
    """What lies before is not moved."""

    def __call__(self, places: np.ndarray) -> np.ndarray:
        head, rest = np.divmod(places - self.first, self.width)
        key_head, turn = np.divmod(head, self.ratio)
        moved = self.first + (turn * self.key_heads + key_head) * self.width + rest
        return np.where(places < self.first, places, moved)


@dataclass(frozen=True, slots=True)
class GatesAndUps:
    """Of the experts' first matrices, which lie as two tensors [experts, width, hidden], one behind the other."""

    experts: int
    width: int

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        expert, row = np.divmod(rows, 2 * self.width)
        tensor, row = np.divmod(row, self.width)
        return (tensor * self.experts + expert) * self.width + row


def movable(group: int, order: Tiled, divisible: bool) -> bool:
    """Whether columns can take another order when `group` of them share a scale: always when no head cuts a group, and
    where it does, if the group is `divisible`, its scale going to both sides."""
    return order.width % group == 0 or (divisible and gcd(group, order.width) >= _SMALLEST_GROUP)


def move_columns(natural: Quantized | Grouped, order: Tiled) -> Quantized | Grouped:
    """The columns in the original's order; codes and scales stay as they are, but scales that a super-block of 256
    shares are repeated for each piece of a head. For `movable` groups only."""
    columns = natural.codes.shape[1]
    places = torch.from_numpy(order(np.arange(columns)))
    codes = natural.codes[:, places]

    def moved(factors: Tensor | None, old: int, new: int) -> Tensor | None:
        if factors is None:
            return None
        repeated = factors.repeat_interleave(old // new, dim=1)[:, : -(-columns // new)]
        if repeated.dtype == torch.float8_e4m3fn:
            return repeated.view(torch.uint8)[:, places[::new] // new].view(torch.float8_e4m3fn)
        return repeated[:, places[::new] // new]

    if isinstance(natural, Quantized):
        group = FORMATS[natural.format].group
        return Quantized(natural.format, codes, moved(natural.scales, group, group), natural.row_scale)
    old = natural.layout
    group, span = gcd(old.group, order.width), gcd(old.span, order.width)
    scales = moved(natural.scales, old.span, span)
    assert scales is not None
    sub_scales, sub_mins = moved(natural.sub_scales, old.group, group), moved(natural.sub_mins, old.group, group)
    layout = Layout(old.bits, group, span, old.zero, old.table)
    return Grouped(layout, codes, scales, sub_scales, moved(natural.mins, old.span, span), sub_mins)


def gather(parts: list[np.ndarray], order: Order | None, first: int, last: int) -> np.ndarray:
    """Rows [first, last) of the original from `parts`, of equal shape [rows, bytes], one behind the other. A view where
    nothing moves."""
    if order is None and len(parts) == 1:
        return parts[0][first:last]
    wanted = np.arange(first, last)
    part, row = np.divmod(wanted if order is None else order(wanted), len(parts[0]))
    out = np.empty((last - first, prod(parts[0].shape[1:])), dtype=np.uint8)
    for number, data in enumerate(parts):
        here = part == number
        out[here] = data[row[here]]
    return out
