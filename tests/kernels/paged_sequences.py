"""Random sequences in pages, everything that does not belong to them poisoned, and attention in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.batch import PagedBatch
from kernels.kv_codec import KvForm, LayerKv, Rows, layer_views, plain_form, rotate, write

LAYERS, LAYER = 3, 1
"""Of the pool, and the one with the sequences."""
POISON = 255
"""Of every byte. NaN in every float format and scale; -1 in the integers, whose scales are NaN."""


@dataclass(frozen=True, slots=True)
class PagedSequences:
    q: Tensor
    """[T + 1, heads, head_dim]: a slice of a wider tensor; the last row belongs to nobody."""
    pool: Tensor
    """uint8 [pages, page_bytes]: poison but for the sequences' tokens in `kv`."""
    kv: LayerKv
    batch: PagedBatch
    counts: tuple[int, ...]
    contexts: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    scale: float

    def expected(self) -> Tensor:
        """float64, of what the codec decodes; NaN in the rows of nobody."""
        out = torch.full(self.q.shape, torch.nan, dtype=torch.float64, device=self.q.device)
        group = self.q.shape[1] // self.kv.keys.codes.shape[2]
        first = 0
        for count, context, table in zip(self.counts, self.contexts, self.tables, strict=True):
            queries = self.q[first : first + count].double()
            keys, values = (self.read(rows, table)[:context] for rows in (self.kv.keys, self.kv.values))
            position = torch.arange(context - count, context, device=self.q.device)
            seen = torch.arange(context, device=self.q.device) <= position[:, None]
            for head in range(self.q.shape[1]):
                scores = queries[:, head] @ keys[:, head // group].t() * self.scale
                weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), 1)
                out[first : first + count, head] = weights @ values[:, head // group]
            first += count
        return out

    def read(self, rows: Rows, table: Sequence[int]) -> Tensor:
        """float64 [tokens, kv_heads, head_dim], not rotated."""
        decoded = rows.read(torch.tensor(table, device=self.q.device), torch.float32).flatten(0, 1).double()
        if not self.kv.form.rotated:
            return decoded
        matrix = rotate(torch.eye(64, device=decoded.device)).double()
        return (decoded.unflatten(-1, (-1, 64)) @ matrix).flatten(-2)


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
    form: KvForm | None = None,
) -> PagedSequences:
    """A count of 0 is a sequence that takes no part. The pages of all lie in random order in one pool. form: None
    stands for the plain one of `dtype`."""
    form = form or plain_form(dtype)
    generator = torch.Generator(device).manual_seed(seed)
    sizes = [-(-context // page) for context in contexts]
    order = torch.randperm(sum(sizes) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    page_bytes = LAYERS * page * kv_heads * form.row_bytes(dim)
    pool = torch.full((len(order), page_bytes), POISON, dtype=torch.uint8, device=device)
    kv = layer_views(pool, form, page, kv_heads, dim)[LAYER]
    tables: list[tuple[int, ...]] = []
    for context, size in zip(contexts, sizes, strict=True):
        tables.append(tuple(order.pop() for _ in range(size)))
        place = torch.arange(context, device=device)
        # Small tokens among the others, whose scales are subnormal in E4M3.
        size = torch.where(place % 5 == 0, 1 / 256, 1.0)[:, None, None]
        shape = (context, kv_heads, dim)
        k, v = ((torch.randn(shape, generator=generator, device=device) * size).to(dtype) for _ in range(2))
        write(kv, k, v, torch.tensor(tables[-1], device=device)[place // page], place % page)
    rows = sum(counts) + 1
    q = torch.randn(rows, heads, 2 * dim, generator=generator, device=device).to(dtype)[..., :dim]
    batch = PagedBatch.of(counts, contexts, tables, torch.device(device))
    return PagedSequences(q, pool, kv, batch, tuple(counts), tuple(contexts), tuple(tables), dim**-0.5)
