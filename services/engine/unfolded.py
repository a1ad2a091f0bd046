"""What the last step has computed and the states do not have yet: they get it in the step after, if it was wanted."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.engine.cache.states import StatePool
from services.engine.model.qwen3_5 import HybridDecoder
from services.engine.staging import Staging

_FIELDS = 3
"""State slot, slot that gets a hidden vector, and the row that it is taken from (negative: it stays): int64 a row."""


class Unfolded:
    """Of one token each of up to `rows` sequences."""

    def __init__(self, model: HybridDecoder, states: StatePool, rows: int) -> None:
        device = model.device
        self.rows = rows
        self.records = model.records(rows)
        self._model = model
        self._states = states
        self._hidden = torch.zeros(rows, model.config.hidden_size, dtype=states.hidden.dtype, device=device)
        self._staging = Staging((8 * _FIELDS + 4) * rows, device)
        (self._slots, self._targets, self._sources), self._accepted = self._parts(self._staging.device)
        self._places = torch.arange(rows, device=device)
        self.fill(())

    def fill(self, slots: Sequence[int]) -> None:
        """What the next `fold` does: slots[n] is the state slot of row n of the last step, negative where the step was
        not wanted. Enqueues a copy."""
        wide, accepted = (part.numpy() for part in self._parts(self._staging.host()))
        kept = [(slot, row) for row, slot in enumerate(slots) if slot >= 0]
        target, source = kept[0] if kept else (0, -1)
        # Places of nobody repeat the first one's: equal writes to one slot.
        wide[:] = [[-1], [target], [source]]
        accepted[:] = 0
        for slot, row in kept:
            wide[:, row] = (slot, slot, row)
            accepted[row] = 1
        self._staging.copy()

    def fold(self, rows: int) -> None:
        """Enqueue it for the first `rows` rows. A graph may capture it."""
        states, slots = self._states, self._slots[:rows]
        self._model.fold(states.columns, states.states, slots, self._places[:rows], self._accepted[:rows], self.records)
        targets, sources = self._targets[:rows], self._sources[:rows]
        fresh = self._hidden[sources.clamp(min=0)]
        states.hidden[targets] = torch.where(sources[:, None] < 0, states.hidden[targets], fresh)

    def keep(self, hidden: Tensor) -> None:
        """The vectors behind a step's tokens, [rows of the step, hidden]."""
        self._hidden[: len(hidden)].copy_(hidden)

    def _parts(self, piece: Tensor) -> tuple[Tensor, Tensor]:
        border = 8 * _FIELDS * self.rows
        return piece[:border].view(torch.int64).view(_FIELDS, -1), piece[border:].view(torch.int32)
