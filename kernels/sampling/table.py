"""How each row of a step is drawn: values on the host, and the tensors that kernels read them from."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PROMPT_MARK = -(2**15)
"""The bit of a cell that says: in the prompt."""
MOST_COUNTED = 2**15 - 1
"""The other bits of a cell: how often it was drawn, this at most."""
_WIDTH = 8
"""Words of a row in each half of the table."""
_IDLE = (-1, 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Adjustment:
    """What happens to a row's logits before the draw. The kernels read the tensors by their addresses: whoever fills a
    table with this keeps it until another fill."""

    cells: Tensor | None = None
    """int16 [V], contiguous: of each token PROMPT_MARK and its count. The draw counts its token there. None: no
    penalties."""
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias_ids: Tensor | None = None
    """int64 [n], each id once, all in [0, V)."""
    bias: Tensor | None = None
    """float32 [n]"""


@dataclass(frozen=True, slots=True)
class DrawRow:
    """As of `kernels.sampling.draw`."""

    temperature: float
    """0: the most probable token, of equals the one of the lowest id."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0
    adjustment: Adjustment | None = None


class DrawTable:
    """The rows of a step, in place: a captured graph that reads it serves other rows after another `fill`.

    All calls from one thread, with one current stream.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        """rows: at most."""
        cuda = device.type == "cuda"
        self.rows: Sequence[DrawRow] = ()
        """Of the last fill, the idle ones not among them. They keep alive what the kernels read by address."""
        self.capacity = rows
        self._staging = torch.zeros(2, rows, _WIDTH, dtype=torch.int64, pin_memory=cuda)
        self._words = torch.zeros(2, rows, _WIDTH, dtype=torch.int64, device=device)
        self._copied = torch.cuda.Event() if cuda else None
        self._floats = self._staging[0].view(torch.float64)
        self.floats = self._words[0].view(torch.float64)
        """[rows, 8]: temperature, top_p, min_p, uniform, repetition, presence, frequency, nothing."""
        self.ints = self._words[1]
        """[rows, 8]: top_k, -1 where nothing is drawn; address of the cells or 0; addresses of ids and values of the
        bias, how many they are; nothing."""

    def fill(self, rows: Sequence[DrawRow]) -> None:
        """All others are idle: their token is 0. One copy to the device, not waited for. Raises ValueError for more
        rows than there are."""
        if len(rows) > self.capacity:
            raise ValueError(f"{len(rows)} rows for a table of {self.capacity}")
        if self._copied is not None:
            self._copied.synchronize()
        idle = self.capacity - len(rows)
        self._staging[1] = torch.tensor([*map(_ints, rows), *[_IDLE] * idle], dtype=torch.int64)
        if rows:
            self._floats[: len(rows)] = torch.tensor([*map(_floats, rows)], dtype=torch.float64)
        self._words.copy_(self._staging, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        # Only now: what was enqueued before this copy may read the old rows, and memory freed here is reused behind it.
        self.rows = tuple(rows)


def _floats(row: DrawRow) -> tuple[float, ...]:
    made = row.adjustment or Adjustment()
    penalties = (made.repetition, made.presence, made.frequency)
    return (row.temperature, row.top_p, row.min_p, row.uniform, *penalties, 0.0)


def _ints(row: DrawRow) -> tuple[int, ...]:
    made = row.adjustment or Adjustment()
    cells = 0 if made.cells is None else made.cells.data_ptr()
    if made.bias_ids is None or made.bias is None:
        return (row.top_k, cells, 0, 0, 0, 0, 0, 0)
    return (row.top_k, cells, made.bias_ids.data_ptr(), made.bias.data_ptr(), len(made.bias), 0, 0, 0)
