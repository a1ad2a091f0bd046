"""Which tokens of a step belong to which recurrent state: made once a step, used by every recurrent layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateSpan:
    """A sequence with several tokens in this step (prefill)."""

    first: int
    count: int
    """Its tokens are rows [first, first + count) of the flat batch."""
    slot: int


@dataclass(frozen=True, slots=True)
class PackedSpans:
    """The tokens of all spans, one span behind the other, as kernels over rows of different length want them."""

    tokens: Tensor
    """int64 [N], rows of the flat batch."""
    borders: Tensor
    """int32 [spans + 1]: span s is [borders[s], borders[s + 1]) of them."""
    slots: Tensor
    """int64 [spans]."""


@dataclass(frozen=True, slots=True)
class StatePlan:
    spans: tuple[StateSpan, ...]
    packed: PackedSpans | None
    """The spans again; None where there are none."""
    singles: Tensor
    """int64 [B], rows of the flat batch that are their sequence's only token in this step (decode)."""
    slots: Tensor
    """int64 [B], their slots."""

    def without_singles(self) -> "StatePlan":
        return StatePlan(self.spans, self.packed, self.singles[:0], self.slots[:0])


def plan_recurrence(counts: Sequence[int], slots: Sequence[int], device: torch.device) -> StatePlan:
    """`counts[r]` >= 1 tokens of sequence r follow each other in the flat batch, r ascending; its state lies in slot
    `slots[r]`. No slot may occur twice."""
    spans: list[StateSpan] = []
    singles: list[int] = []
    single_slots: list[int] = []
    first = 0
    for count, slot in zip(counts, slots, strict=True):
        if count == 1:
            singles.append(first)
            single_slots.append(slot)
        else:
            spans.append(StateSpan(first, count, slot))
        first += count
    return StatePlan(
        spans=tuple(spans),
        packed=_pack(spans, device) if spans else None,
        singles=torch.tensor(singles, dtype=torch.int64).to(device),
        slots=torch.tensor(single_slots, dtype=torch.int64).to(device),
    )


def _pack(spans: Sequence[StateSpan], device: torch.device) -> PackedSpans:
    lengths = torch.tensor([0, *[span.count for span in spans]])
    return PackedSpans(
        tokens=torch.cat([torch.arange(span.first, span.first + span.count) for span in spans]).to(device),
        borders=lengths.cumsum(0).to(torch.int32).to(device),
        slots=torch.tensor([span.slot for span in spans], dtype=torch.int64).to(device),
    )


@dataclass(frozen=True, slots=True)
class ReplayRows:
    """Several rows of a step for each of B sequences (verification of drafts), and where the records of them go. On the
    device, so that a captured graph reads them anew; no slot and no record occurs twice."""

    slots: Tensor
    """int64 [B]. Negative: nobody's, the sequence is left out."""
    tokens: Tensor
    """int64 [B]: its first row of the step; the others follow,"""
    counts: Tensor
    """int32 [B]: so many in all, 0 to `longest`."""
    places: Tensor
    """int64 [B]: its first row of the records; the others follow."""
    longest: int
