"""Which queries of a step attend to which pages, as the kernels read it: from the device, so that a captured graph
serves every step of its bucket."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Sequences with a count of 0 are none: a graph's spare places. int32, on one device."""

    first: Tensor
    """[B]: the queries of sequence b are rows [first[b], first[b] + counts[b]) of the flat batch."""
    counts: Tensor
    """[B]"""
    contexts: Tensor
    """[B]: tokens that its last query sees, itself included; query i stands at position contexts - counts + i."""
    tables: Tensor
    """[B, P], rows of any stride: where the tokens lie, in order. What is behind ceil(contexts / page_tokens) is not
    read."""

    def __post_init__(self) -> None:
        for tensor in (self.first, self.counts, self.contexts, self.tables):
            if tensor.dtype != torch.int32 or tensor.stride(-1) != 1 or len(tensor) != len(self.first):
                raise ValueError(f"{tensor.dtype} {tuple(tensor.shape)}: not int32, or not of {len(self.first)} rows")

    @classmethod
    def of(
        cls,
        counts: Sequence[int],
        contexts: Sequence[int],
        page_tables: Sequence[Sequence[int]],
        device: torch.device,
        first: Sequence[int] | None = None,
    ) -> "PagedBatch":
        """`first`: where in the flat batch the queries of each begin; None: they follow each other. Raises ValueError
        for counts or contexts that cannot be."""
        if any(count < 0 or count > context for count, context in zip(counts, contexts, strict=True)):
            raise ValueError(f"{list(counts)} queries of contexts of {list(contexts)} tokens")
        sizes = torch.tensor(counts, dtype=torch.int32)
        starts = sizes.cumsum(0, dtype=torch.int32) - sizes if first is None else torch.tensor(first, dtype=torch.int32)
        width = max((len(table) for table in page_tables), default=0)
        tables = torch.zeros(len(counts), max(width, 1), dtype=torch.int32)
        for table, row in zip(page_tables, tables, strict=True):
            row[: len(table)] = torch.tensor(table, dtype=torch.int32)
        seen = torch.tensor(contexts, dtype=torch.int32)
        return cls(starts.to(device), sizes.to(device), seen.to(device), tables.to(device))
