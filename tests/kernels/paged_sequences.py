"""Random sequences in pages, everything that does not belong to them poisoned, and attention in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.batch import PagedBatch


@dataclass(frozen=True, slots=True)
class PagedSequences:
    q: Tensor
    """[T + 1, heads, head_dim]: a slice of a wider tensor; the last row belongs to nobody."""
    keys: Tensor
    values: Tensor
    """[pages, page, kv_heads, head_dim]: views of a block-major pool; NaN but for the sequences' tokens."""
    batch: PagedBatch
    counts: tuple[int, ...]
    contexts: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    scale: float

    def expected(self) -> Tensor:
        """float64; NaN in the rows of nobody."""
        out = torch.full(self.q.shape, torch.nan, dtype=torch.float64, device=self.q.device)
        first = 0
        for count, context, table in zip(self.counts, self.contexts, self.tables, strict=True):
            queries = self.q[first : first + count].double()
            pages = torch.tensor(table, device=self.q.device)
            position = torch.arange(context - count, context, device=self.q.device)
            seen = torch.arange(context, device=self.q.device) <= position[:, None]
            group = self.q.shape[1] // self.keys.shape[2]
            for head in range(self.q.shape[1]):
                k, v = (
                    kept[:, :, head // group].index_select(0, pages).flatten(0, 1)[:context].double()
                    for kept in (self.keys, self.values)
                )
                scores = (queries[:, head] @ k.t() * self.scale).masked_fill(~seen, -torch.inf)
                out[first : first + count, head] = torch.softmax(scores, 1) @ v
            first += count
        return out


def paged_sequences(
    counts: Sequence[int],
    contexts: Sequence[int],
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
    page: int = 64,
    seed: int = 0,
) -> PagedSequences:
    """A count of 0 is a sequence that takes no part. The pages of all lie in random order in one pool."""
    generator = torch.Generator(device).manual_seed(seed)
    sizes = [-(-context // page) for context in contexts]
    order = torch.randperm(sum(sizes) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    pool = torch.full((len(order), 2, 2, page, kv_heads, dim), torch.nan, dtype=dtype, device=device)
    keys, values = pool[:, 1, 0], pool[:, 1, 1]
    tables: list[tuple[int, ...]] = []
    for context, size in zip(contexts, sizes, strict=True):
        table = tuple(order.pop() for _ in range(size))
        tables.append(table)
        for place, number in enumerate(table):
            held = min(page, context - place * page)
            for kept in (keys, values):
                shape = (held, kv_heads, dim)
                kept[number, :held] = torch.randn(shape, generator=generator, device=device).to(dtype)
    rows = sum(counts) + 1
    q = torch.randn(rows, heads, 2 * dim, generator=generator, device=device).to(dtype)[..., :dim]
    batch = PagedBatch.of(counts, contexts, tables, torch.device(device))
    return PagedSequences(q, keys, values, batch, tuple(counts), tuple(contexts), tuple(tables), dim**-0.5)
