"""The head for multi-token prediction: one attention layer that drafts the token after the next, and so on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from services.engine.batch import Row
from services.engine.cache.pages import KvLayout, KvPages
from services.engine.config import KvFormat
from services.engine.model.attention import GatedAttention
from services.engine.model.context import begun_pages, forward_context
from services.engine.model.layers import CentredRmsNorm, ForwardContext, Projection
from services.engine.model.matrix import Place
from services.engine.model.qwen3_5 import HybridBlock, HybridDecoder


class MtpHead:
    """h' = norm(layer(W [norm(embed(following token)), norm(h)])), where h is the decoder's hidden vector behind its
    final norm, or the h' of the draft before; embedding and head are the decoder's. Its memory is not initialised:
    every slot must be filled before the first forward."""

    def __init__(self, decoder: HybridDecoder, kv_format: KvFormat = "auto") -> None:
        """`kv_format`: of the head's own K and V."""
        config = decoder.config
        empty = partial(torch.empty, dtype=decoder.dtype, device=decoder.device)
        self.decoder = decoder
        self._kv_format: KvFormat = kv_format
        self._embedding_norm = CentredRmsNorm(config.hidden_size, config.rms_norm_eps, empty)
        self._hidden_norm = CentredRmsNorm(config.hidden_size, config.rms_norm_eps, empty)
        self._fc = Projection(2 * config.hidden_size, config.hidden_size, False, empty)
        self._block = HybridBlock(config, "mtp.layers.0", GatedAttention(config, 0, empty), empty)
        self._norm = CentredRmsNorm(config.hidden_size, config.rms_norm_eps, empty)

    @property
    def kv_layout(self) -> KvLayout:
        """Of the pages that the head's own K and V lie in."""
        return replace(KvLayout.of(self.decoder.config, self.decoder.dtype, self._kv_format), layers=1)

    def slots(self) -> Iterator[Place]:
        """Everything that a checkpoint must bring."""
        yield from self._fc.slots("mtp.fc")
        yield from self._embedding_norm.slots("mtp.pre_fc_norm_embedding")
        yield from self._hidden_norm.slots("mtp.pre_fc_norm_hidden")
        yield from self._block.slots()
        yield from self._norm.slots("mtp.norm")

    def forward(self, hidden: Tensor, following: Tensor, context: ForwardContext) -> Tensor:
        """hidden [T, hidden] at the context's positions, following int64 [T]: the token behind each. Returns h'
        [T, hidden], from which `decoder.logits` draws the token behind `following`."""
        embedded = self._embedding_norm(self.decoder.embed(following))
        x = self._fc(torch.cat((embedded, self._hidden_norm(hidden)), dim=-1), dtype=torch.float32)
        cos, sin = self.decoder.angles(context.positions)
        return self._norm(self._block(x, cos, sin, context))


@dataclass(frozen=True, slots=True)
class DraftRow:
    """What a verified step brought to one sequence: hidden vectors at [start, start + n) and the n tokens behind."""

    start: int
    hidden: Tensor
    """[n, hidden], n >= 1, behind the decoder's final norm."""
    following: Sequence[int]
    """n tokens, those at [start + 1, start + n + 1); the last one is the newest of the sequence."""
    pages: Sequence[int]
    """Of the head's own pool, covering [0, start + n + drafts - 1). Positions below `start` were written before."""


def draft(head: MtpHead, pages: KvPages, rows: Sequence[DraftRow], drafts: int) -> Tensor:
    """The `drafts` >= 1 most probable tokens behind each row's newest, int64 [rows, drafts].

    Draft k attends to the first drafts' K and V at all past positions, which this call writes for good, and to those of
    the k - 1 drafts before it, which the next call for the sequence overwrites. To be called under
    torch.inference_mode.
    """
    counts = [len(row.following) for row in rows]
    device = head.decoder.device
    context = _context(pages, [(row.start, row.pages, count) for row, count in zip(rows, counts, strict=True)], device)
    following = torch.tensor([token for row in rows for token in row.following], dtype=torch.int64).to(device)
    hidden = head.forward(torch.cat([row.hidden for row in rows]), following, context)
    hidden = hidden[(torch.tensor(counts).cumsum(0) - 1).to(device)]
    tokens = [head.decoder.logits(hidden).argmax(-1)]
    for ahead in range(1, drafts):
        places = [(row.start + count - 1 + ahead, row.pages, 1) for row, count in zip(rows, counts, strict=True)]
        hidden = head.forward(hidden, tokens[-1], _context(pages, places, device))
        tokens.append(head.decoder.logits(hidden).argmax(-1))
    return torch.stack(tokens, dim=1)


def _context(pages: KvPages, places: Sequence[tuple[int, Sequence[int], int]], device: torch.device) -> ForwardContext:
    """(start, page table, number of tokens) of each row."""
    rows = [Row("", (0,) * count, start, table, start, sample=None) for start, table, count in places]
    pages.clear(begun_pages(rows))
    return forward_context(rows, pages, None, device)
