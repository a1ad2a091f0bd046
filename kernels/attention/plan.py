"""Which queries of a step attend to which pages: made once a step, used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """A sequence with several queries in this step (prefill)."""

    first: int
    count: int
    """Its queries are rows [first, first + count) of the flat batch."""
    context: int
    """Tokens that its last query sees, itself included: query i stands at position context - count + i."""
    pages: Tensor
    """int64 [ceil(context / page_tokens)]."""


@dataclass(frozen=True, slots=True)
class SingleGroup:
    """Sequences of similar length with one query each (decode), attended to in one go."""

    queries: Tensor
    """int64 [B], rows of the flat batch."""
    pages: Tensor
    """int64 [B, P]; shorter sequences are filled up with the blank page."""
    seen: Tensor
    """bool [B, 1, 1, P * page_tokens]: False behind the sequence's end."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    spans: tuple[Span, ...]
    groups: tuple[SingleGroup, ...]


def plan_attention(
    counts: Sequence[int],
    contexts: Sequence[int],
    page_tables: Sequence[Sequence[int]],
    page_tokens: int,
    blank_page: int,
    device: torch.device,
) -> AttentionPlan:
    """`counts[r]` queries of sequence r follow each other in the flat batch, r ascending; the last one sees
    `contexts[r]` tokens, which lie in `page_tables[r]`. `blank_page` is a page that is all zeros and stays so.
    """
    spans: list[Span] = []
    singles: list[tuple[int, int, int]] = []  # pages, sequence, flat row
    first = 0
    for sequence, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        used = -(-context // page_tokens)
        if count == 1:
            singles.append((used, sequence, first))
        else:
            pages = torch.tensor(page_tables[sequence][:used], dtype=torch.int64).to(device)
            spans.append(Span(first, count, context, pages))
        first += count

    groups: list[SingleGroup] = []
    singles.sort()
    while singles:
        # Filling up to the longest at most doubles the work of the shortest.
        taken = [single for single in singles if single[0] <= 2 * singles[0][0]]
        singles = singles[len(taken) :]
        width = taken[-1][0]
        table = [[*page_tables[sequence][:used], *[blank_page] * (width - used)] for used, sequence, _ in taken]
        lengths = torch.tensor([contexts[sequence] for _, sequence, _ in taken])
        seen = torch.arange(width * page_tokens) < lengths[:, None]
        groups.append(
            SingleGroup(
                queries=torch.tensor([row for _, _, row in taken], dtype=torch.int64).to(device),
                pages=torch.tensor(table, dtype=torch.int64).to(device),
                seen=seen[:, None, None].to(device),
            )
        )
    return AttentionPlan(tuple(spans), tuple(groups))
