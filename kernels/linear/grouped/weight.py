"""A matrix quantized in groups, in the form that the kernels read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.linear.grouped import planes
from kernels.linear.grouped.form import BLOCK, Grouped, Layout


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Immutable. All tensors but `codes` are as in `Grouped`, cut into blocks of 128 columns; those whose entry serves
    several blocks have one entry a block (sub-scales) or a span (scales). Rows lie in dim 1 of every tensor, which need
    be contiguous in dims 1 and 2 only, so that a range of rows is a view."""

    layout: Layout
    rows: int
    columns: int
    """Without the padding that `codes` has."""
    codes: Tensor
    """int32 [blocks, N, 4 * bits], see `planes`."""
    scales: Tensor
    """[blocks, N, 128 / span], or [ceil(K / span), N, 1] for spans of 128 and more. Zero behind the last column."""
    sub_scales: Tensor | None = None
    """int8 [blocks, N, 128 / group], 1 for groups of 128 and more."""
    mins: Tensor | None = None
    sub_mins: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """What one pass over the matrix reads."""
        return sum(part.nbytes for part in self.tensors().values())

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def tensors(self) -> dict[str, Tensor]:
        """By field name, for storing; `GroupedWeight(layout, rows, columns, **tensors)` is the inverse."""
        named = {
            "codes": self.codes,
            "scales": self.scales,
            "sub_scales": self.sub_scales,
            "mins": self.mins,
            "sub_mins": self.sub_mins,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def to(self, device: torch.device) -> "GroupedWeight":
        return replace(self, **{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def narrow(self, first: int, rows: int) -> "GroupedWeight":
        """Rows [first, first + rows), without a copy: one expert of many, or one projection of a stack."""
        if not 0 <= first <= first + rows <= self.rows:
            raise ValueError(f"rows {first} to {first + rows} of {self.rows}")
        return replace(self, rows=rows, **{name: t.narrow(1, first, rows) for name, t in self.tensors().items()})

    def take(self, ids: Tensor) -> "GroupedWeight":
        """The rows `ids`, int64 [n], copied: an embedding's."""
        return replace(self, rows=len(ids), **{name: t.index_select(1, ids) for name, t in self.tensors().items()})


def pack(grouped: Grouped) -> GroupedWeight:
    """Exact. Any device; the result is contiguous and lies where the codes do."""
    layout, columns = grouped.layout, grouped.columns

    def coarse(factors: Tensor | None) -> Tensor | None:
        if factors is None:
            return None
        if layout.span < BLOCK:
            return _blocks(factors, BLOCK // layout.span, -(-columns // BLOCK))
        return factors.t()[:, :, None].contiguous()

    def fine(factors: Tensor | None) -> Tensor | None:
        if factors is None:
            return None
        blocks = -(-columns // BLOCK)
        if layout.group < BLOCK:
            return _blocks(factors, BLOCK // layout.group, blocks)
        return factors[:, _owners(layout.group, blocks, factors.device)].t()[:, :, None].contiguous()

    scales = coarse(grouped.scales)
    assert scales is not None
    return GroupedWeight(
        layout,
        grouped.rows,
        columns,
        planes.pack(grouped.codes, layout.bits),
        scales,
        fine(grouped.sub_scales),
        coarse(grouped.mins),
        fine(grouped.sub_mins),
    )


def unpack(weight: GroupedWeight) -> Grouped:
    """The inverse of `pack`, bit for bit."""
    layout, columns = weight.layout, weight.columns

    def natural(factors: Tensor | None, size: int) -> Tensor | None:
        if factors is None:
            return None
        entries = -(-columns // size)
        if size < BLOCK:
            return factors.transpose(0, 1).flatten(1)[:, :entries].contiguous()
        return factors[:, :, 0].t()[:, _firsts(size, entries, len(factors), factors.device)].contiguous()

    scales = natural(weight.scales, layout.span)
    assert scales is not None
    return Grouped(
        layout,
        planes.unpack(weight.codes, layout.bits, columns),
        scales,
        natural(weight.sub_scales, layout.group),
        natural(weight.mins, layout.span),
        natural(weight.sub_mins, layout.group),
    )


def stack(parts: Sequence[GroupedWeight]) -> GroupedWeight:
    """One above the other: all of one layout, as many columns and equal dtypes of scales. Raises ValueError."""
    first = parts[0]
    kinds = [(part.layout, part.columns, {n: t.dtype for n, t in part.tensors().items()}) for part in parts]
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(f"cannot stack {kinds}")
    joined = {name: torch.cat([part.tensors()[name] for part in parts], dim=1) for name in first.tensors()}
    return GroupedWeight(first.layout, sum(part.rows for part in parts), first.columns, **joined)


def _blocks(factors: Tensor, per_block: int, blocks: int) -> Tensor:
    rows, entries = factors.shape
    padded = pad(factors, (0, blocks * per_block - entries))
    return padded.view(rows, blocks, per_block).transpose(0, 1).contiguous()


def _owners(size: int, blocks: int, device: torch.device) -> Tensor:
    """Of each block the group that it lies in."""
    return torch.arange(blocks, device=device) * BLOCK // size


def _firsts(size: int, entries: int, stored: int, device: torch.device) -> Tensor:
    """The entry of a packed tensor of `stored` ones that holds each group's factor."""
    steps = size // BLOCK if stored > entries else 1
    return torch.arange(entries, device=device) * steps
