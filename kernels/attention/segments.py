"""Coded K and V decoded once for all queries of a launch of `prefill`, a bounded piece of the context at a time."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.attention import expand as kernels
from kernels.attention.batch import PagedBatch
from kernels.attention.launch import PrefillLaunch, segment_tokens
from kernels.attention.shapes import row_codec
from kernels.kv_codec import LayerKv, plain_layer

_expand: Any = kernels.expand
_ROWS, _WARPS = 32, 4
"""Tokens of a program of `expand`, and its warps: 64 numbers a lane of a head of 256 dims."""


@dataclass(frozen=True, slots=True)
class Carry:
    """What queries have of the segments before (`triton.prefill`): 4 * heads * (head_dim + 2) bytes each. What lies
    there before the first segment is not read."""

    acc: Tensor
    """float32 [T, heads, head_dim]"""
    peak: Tensor
    """float32 [T, heads]"""
    total: Tensor
    """float32 [T, heads]"""

    @property
    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.acc, self.peak, self.total


@dataclass(frozen=True, slots=True)
class Segments:
    """Launches of one stream may share them, one after the other."""

    tokens: int
    """Of each sequence in a segment: whole pages."""
    longest: int
    plain: LayerKv
    """[sequences * pages of a segment, page_tokens, kv_heads, head_dim], of the type of q. Not rotated, whatever is
    decoded to there."""
    carry: Carry | None
    """None where there is one segment."""

    @classmethod
    def of(cls, q: Tensor, kv: LayerKv, sequences: int, longest: int, launch: PrefillLaunch) -> "Segments":
        """For q [T, heads, head_dim] and so many sequences, none of which sees more than `longest` tokens. Takes
        `launch.scratch` bytes at most, but a page a sequence at least; and a `Carry` where `longest` is more than a
        segment."""
        page, kv_heads = kv.keys.codes.shape[1:3]
        rows, heads, dim = q.shape
        tokens = segment_tokens(sequences, longest, 2 * kv_heads * dim * q.element_size(), page, launch.scratch)
        shape = (sequences * (tokens // page), page, kv_heads, dim)
        keys, values = (torch.empty(shape, dtype=q.dtype, device=q.device) for _ in range(2))
        carry = None
        if longest > tokens:
            sizes = ((rows, heads, dim), (rows, heads), (rows, heads))
            carry = Carry(*(torch.empty(size, dtype=torch.float32, device=q.device) for size in sizes))
        return cls(tokens, longest, plain_layer(keys, values), carry)

    @property
    def count(self) -> int:
        return -(-self.longest // self.tokens)

    @property
    def pages(self) -> int:
        """Of each sequence in a segment."""
        return self.tokens // self.plain.keys.codes.shape[1]

    def fill(self, kv: LayerKv, batch: PagedBatch, segment: int) -> None:
        """Decode tokens [segment * tokens, (segment + 1) * tokens) of each sequence, its first ones to page
        sequence * tokens / page_tokens. The numbers are those of `Rows.read`, rotated rows turned back by sums that are
        rounded once. What lies behind a sequence's end, or belongs to one without queries, is undefined."""
        page, kv_heads, dim = self.plain.keys.codes.shape[1:]
        keys, key_dims = row_codec(kv.keys.codec, dim)
        values, value_dims = row_codec(kv.values.codec, dim)
        tile = min(_ROWS, page)
        tiles = -(-min(self.tokens, self.longest - segment * self.tokens) // tile)
        page_words = kv.keys.codes.stride(0) * kv.keys.codes.itemsize // 4
        _expand[(tiles, kv_heads, len(batch.first))](
            kv.keys.codes, kv.keys.scales, kv.values.codes, kv.values.scales, self.plain.keys.codes,
            self.plain.values.codes, batch.counts, batch.contexts, batch.tables, page_words, batch.tables.stride(0),
            segment * self.tokens, self.tokens, D=dim, PAGE=page, BN=tile, KEYS=keys, KEY_DIMS=key_dims, VALUES=values,
            VALUE_DIMS=value_dims, ROTATED=kv.form.rotated, num_warps=_WARPS,
        )  # fmt: skip
