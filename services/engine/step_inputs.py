"""What a step of few tokens a sequence reads that differs between steps, at addresses that never change, so that a
captured graph finds it there."""

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
from services.engine.staging import Staging
from services.protocol.hashing import BLOCK_TOKENS

_TOKEN_FIELDS = 5
"""Token, which one of the last draw to take instead (negative: none), position, page and offset: int64 a token."""
_ROW_FIELDS = 3
"""State slot, last token and the slot that gets its hidden vector: int64 a sequence."""
_SIZES = 2
"""Tokens of the step and of the sequence: int32 a sequence."""


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

    @property
    def pages(self) -> int:
        return -(-self.context // BLOCK_TOKENS)

    def holds(self, rows: int, context: int) -> bool:
        return rows <= self.rows and context <= self.context


class StepInputs:
    """May be filled for a step while the device runs the one before."""

    def __init__(
        self,
        bucket: Bucket,
        pages: KvPages,
        states: StatePool | None,
        device: torch.device,
        records: Records | None = None,
    ) -> None:
        """`records`: the states stay as they are, and what moves them on goes there, to a row for each of the bucket's
        tokens. Without them the states are moved on, by one token a sequence."""
        self._bucket = bucket
        self._fields = Staging(
            8 * (_TOKEN_FIELDS * bucket.tokens + _ROW_FIELDS * bucket.rows) + 4 * _SIZES * bucket.rows, device
        )
        self._tables = Staging(4 * bucket.rows * bucket.pages, device)
        self._held: list[list[int]] = []
        """The page tables that it has, or will have by the next step."""
        (self._given, self._drawn, positions, places, offsets), (slots, last, kept), sizes = self._parts(
            self._fields.device
        )
        each = torch.arange(bucket.tokens, dtype=torch.int64, device=device)
        first = torch.arange(0, bucket.tokens, bucket.width, dtype=torch.int64, device=device)
        batch = PagedBatch(first.to(torch.int32), sizes[0], sizes[1], self._table_rows(self._tables.device))
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
                else Replay(ReplayRows(slots, first, sizes[0], first, bucket.width), records),
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

    def tokens(self, drawn: Tensor) -> Tensor:
        """int64 [bucket.tokens], on the device: those that were filled in, or what is in `drawn`, int64, by then; a
        negative one, where nothing could be drawn, is read as 0."""
        return torch.where(self._drawn < 0, self._given, drawn[self._drawn.clamp(min=0)].clamp(min=0))

    def fill(self, rows: Sequence[Row], drawn: Sequence[int] = ()) -> None:
        """Rows of so many tokens as the bucket has at most; enqueues the copies to the device. Those of row n begin at
        n times the bucket's width. drawn: the one token of row n is number drawn[n] of the last draw, which the host
        does not know yet."""
        tokens, own, sizes = (part.numpy() for part in self._parts(self._fields.host()))
        # Of nobody: no page, no state. A hidden vector must go to some slot: to the first row's, once more what goes
        # there.
        tokens[:] = [[0], [-1], [0], [-1], [0]]
        own[:] = [[-1], [0], [rows[0].state if rows else 0]]
        sizes[:] = 0
        for index, row in enumerate(rows):
            first, count = index * self._bucket.width, len(row.tokens)
            source = drawn[index] if drawn else -1
            for ahead, token in enumerate(row.tokens):
                position = row.start + ahead
                page = row.pages[position // BLOCK_TOKENS] if position >= row.write_from else -1
                tokens[:, first + ahead] = (token, source, position, page, position % BLOCK_TOKENS)
            own[:, index] = (row.state, first + count - 1, row.state)
            sizes[:, index] = (count, row.start + count)
        self._fill_tables(rows)
        self._fields.copy()

    def _fill_tables(self, rows: Sequence[Row]) -> None:
        tables = [list(row.pages[: -(-(row.start + len(row.tokens)) // BLOCK_TOKENS)]) for row in rows]
        if tables == self._held[: len(tables)]:
            return
        written = self._table_rows(self._tables.host()).numpy()
        for table, row in zip(tables, written, strict=False):
            row[: len(table)] = table
        self._tables.copy()
        self._held = tables

    def _table_rows(self, piece: Tensor) -> Tensor:
        return piece.view(torch.int32).view(self._bucket.rows, self._bucket.pages)

    def _parts(self, piece: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """int64 [fields, tokens], int64 [fields, rows] and int32 [fields, rows], views."""
        border = _TOKEN_FIELDS * self._bucket.tokens
        end = border + _ROW_FIELDS * self._bucket.rows
        wide = piece[: 8 * end].view(torch.int64)
        narrow = piece[8 * end :].view(torch.int32)
        return wide[:border].view(_TOKEN_FIELDS, -1), wide[border:].view(_ROW_FIELDS, -1), narrow.view(_SIZES, -1)
