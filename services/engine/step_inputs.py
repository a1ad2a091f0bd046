"""What a step of few tokens a sequence reads that differs between steps: a piece of host memory, and one on the device
at addresses that never change, so that a captured graph finds it there."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import PagedBatch, PagedPlan, PagedRows
from kernels.gated_delta.net import Records
from kernels.state_plan import ReplayRows, StatePlan
from services.engine.batch import Row
from services.engine.cache.pages import KvPages
from services.engine.cache.states import StatePool
from services.engine.model.layers import ForwardContext, RecurrentContext, Replay
from services.protocol.hashing import BLOCK_TOKENS

_TOKEN_FIELDS = 4
"""Token, position, page and offset of each token: int64."""
_ROW_FIELDS = 3
"""State slot, last token and the slot that gets its hidden vector, of each sequence: int64."""
_SIZES = 2
"""Tokens of the step and of the sequence, of each sequence: int32."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Steps that one graph serves."""

    rows: int
    """Sequences at most; those that are missing are nobody's."""
    context: int
    """Tokens of a sequence at most, those of the step included."""
    width: int = 1
    """Tokens of a sequence in the step at most: 1 for a decode, more where drafts are verified."""

    @property
    def tokens(self) -> int:
        return self.rows * self.width

    def holds(self, rows: int, context: int) -> bool:
        return rows <= self.rows and context <= self.context


class StepInputs:
    """To be filled again only when the device has run the step: its copies read the host's memory."""

    def __init__(
        self,
        bucket: Bucket,
        pages: KvPages,
        states: StatePool | None,
        device: torch.device,
        records: Records | None = None,
    ) -> None:
        """`records`: for a model with states and a bucket of several tokens a sequence, with a row for each of its
        tokens: the states stay, and what moves them on goes there."""
        self._bucket = bucket
        rows, width = bucket.rows, -(-bucket.context // BLOCK_TOKENS)
        pinned = device.type == "cuda"
        size = 8 * (_TOKEN_FIELDS * bucket.tokens + _ROW_FIELDS * rows) + 4 * _SIZES * rows
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self._host_tables = torch.zeros(rows, width, dtype=torch.int32, pin_memory=pinned)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._device_tables = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self._tokens, self._rows, self._sizes = (part.numpy() for part in self._parts(self._host))
        self._tables = self._host_tables.numpy()
        self._held: list[list[int]] = [[] for _ in range(rows)]
        """The page table that each row of `tables` has."""
        (self.tokens, positions, places, offsets), (slots, last, kept), (counts, contexts) = self._parts(self._device)
        each = torch.arange(bucket.tokens, dtype=torch.int64, device=device)
        first = torch.arange(0, bucket.tokens, bucket.width, dtype=torch.int64, device=device)
        batch = PagedBatch(first.to(torch.int32), counts, contexts, self._device_tables)
        recurrent = None
        if states is not None:
            recurrent = RecurrentContext(
                plan=StatePlan((), None, first, slots),
                states=states.states,
                columns=states.columns,
                hidden=states.hidden,
                last=last,
                slots=kept,
                sampled=kept,
                replay=None
                if records is None
                else Replay(ReplayRows(slots, first, counts, first, bucket.width), records),
            )
        self.context = ForwardContext(
            positions=positions,
            attention=PagedPlan((PagedRows(batch, bucket.width, bucket.context),), None),
            cache=pages.layers,
            pages=places,
            offsets=offsets,
            outputs=each,
            recurrent=recurrent,
        )
        self.fill(())

    def fill(self, rows: Sequence[Row]) -> None:
        """Rows of so many tokens as the bucket has at most; enqueues the copies to the device. Those of row n begin at
        n times the bucket's width."""
        # Of nobody: no page, no state. A hidden vector must go to some slot: to the first row's, once more what goes
        # there.
        self._tokens[:] = [[0], [0], [-1], [0]]
        self._rows[:] = [[-1], [0], [rows[0].state if rows else 0]]
        self._sizes[:] = 0
        for index, row in enumerate(rows):
            first = index * self._bucket.width
            for ahead, token in enumerate(row.tokens):
                position = row.start + ahead
                page = row.pages[position // BLOCK_TOKENS] if position >= row.write_from else -1
                self._tokens[:, first + ahead] = (token, position, page, position % BLOCK_TOKENS)
            count = len(row.tokens)
            self._rows[:, index] = (row.state, first + count - 1, row.state)
            self._sizes[:, index] = (count, row.start + count)
        if self._update_tables(rows):
            self._device_tables.copy_(self._host_tables, non_blocking=True)
        self._device.copy_(self._host, non_blocking=True)

    def _update_tables(self, rows: Sequence[Row]) -> bool:
        changed = False
        for index, row in enumerate(rows):
            table = row.pages[: (row.start + len(row.tokens) - 1) // BLOCK_TOKENS + 1]
            if table != self._held[index]:
                self._tables[index, : len(table)] = table
                self._held[index] = list(table)
                changed = True
        return changed

    def _parts(self, piece: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """int64 [fields, tokens], int64 [fields, rows] and int32 [fields, rows], views."""
        tokens, rows = 8 * _TOKEN_FIELDS * self._bucket.tokens, 8 * _ROW_FIELDS * self._bucket.rows
        wide = piece[: tokens + rows].view(torch.int64)
        border = tokens // 8
        return (
            wide[:border].view(_TOKEN_FIELDS, -1),
            wide[border:].view(_ROW_FIELDS, -1),
            piece[tokens + rows :].view(torch.int32).view(_SIZES, -1),
        )
