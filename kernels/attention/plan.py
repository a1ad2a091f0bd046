"""Which queries of a step attend to which pages: made once a step, used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kernels.attention.batch import PagedBatch
from kernels.attention.launch import ROWS


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
class GatheredPlan:
    """For torch's attention, which wants K and V in one piece."""

    spans: tuple[Span, ...]
    groups: tuple[SingleGroup, ...]


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Sequences with similar numbers of queries, for one launch."""

    batch: PagedBatch
    most: int
    """Queries of a sequence, or more."""
    longest: int
    """Tokens that the last query of a sequence sees, or more."""
    tokens: Tensor | None = None
    """int64: the rows of the flat batch that are theirs, which `batch.first` counts in; None: in the flat batch."""


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """For kernels that read the pages where they lie."""

    few: tuple[PagedRows, ...]
    """Sequences of up to ROWS queries: those with one, and those with several, so that what decodes gets the same
    whatever is verified beside it,"""
    many: PagedRows | None
    """and the others."""


AttentionPlan = GatheredPlan | PagedPlan


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
    if device.type == "cuda":
        return _paged(counts, contexts, page_tables, device)
    return gathered(counts, contexts, page_tables, page_tokens, blank_page, device)


def gathered(
    counts: Sequence[int],
    contexts: Sequence[int],
    page_tables: Sequence[Sequence[int]],
    page_tokens: int,
    blank_page: int,
    device: torch.device,
    first: Sequence[int] | None = None,
) -> GatheredPlan:
    """As `plan_attention`; `first`: where in the flat batch the queries of each begin, None: they follow each other."""
    spans: list[Span] = []
    singles: list[tuple[int, int, int]] = []  # pages, sequence, flat row
    starts = _starts(counts) if first is None else first
    for sequence, (start, count, context) in enumerate(zip(starts, counts, contexts, strict=True)):
        used = -(-context // page_tokens)
        if count == 1:
            singles.append((used, sequence, start))
        elif count:
            pages = torch.tensor(page_tables[sequence][:used], dtype=torch.int64).to(device)
            spans.append(Span(start, count, context, pages))

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
    return GatheredPlan(tuple(spans), tuple(groups))


def _paged(
    counts: Sequence[int], contexts: Sequence[int], page_tables: Sequence[Sequence[int]], device: torch.device
) -> PagedPlan:
    starts = _starts(counts)
    sequences = range(len(counts))
    singles = [sequence for sequence in sequences if counts[sequence] == 1]
    several = [sequence for sequence in sequences if 1 < counts[sequence] <= ROWS]
    many = [sequence for sequence in sequences if counts[sequence] > ROWS]

    def rows(taken: Sequence[int], alone: bool) -> PagedRows:
        own, seen = [counts[sequence] for sequence in taken], [contexts[sequence] for sequence in taken]
        tables = [page_tables[sequence] for sequence in taken]
        if alone:
            first, tokens = [starts[sequence] for sequence in taken], None
        else:
            first = _starts(own)
            flat = [starts[sequence] + row for sequence in taken for row in range(counts[sequence])]
            tokens = torch.tensor(flat, dtype=torch.int64).to(device)
        return PagedRows(PagedBatch.of(own, seen, tables, device, first), max(own), max(seen), tokens)

    few = [taken for taken in (singles, several) if taken]
    alone = len(few) == 1 and not many
    return PagedPlan(tuple(rows(taken, alone) for taken in few), rows(many, True) if many else None)


def _starts(counts: Sequence[int]) -> list[int]:
    return [end - count for end, count in zip(accumulate(counts), counts, strict=True)]
