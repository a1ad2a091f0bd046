"""The large matrices of a model: plain, or packed in the format that the checkpoint has."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from kernels.elementwise import silu_gated
from kernels.embedding import embed
from kernels.linear import linear, swiglu
from kernels.linear.grouped import weight as grouped
from kernels.linear.grouped.weight import GroupedWeight
from kernels.linear.quantized import FP8_BLOCK
from kernels.linear.weight import Weight, stack
from services.engine.model.slot import Empty, Slot

Block = Tensor | Weight | GroupedWeight
"""Some rows of a matrix: plain ones [rows, columns] in the model's dtype, or packed ones."""


class Matrix:
    """W [rows, columns], one or more blocks one above the other. It takes no memory before either its `dense` form is
    asked for, to be filled, or `bind` brings the blocks; afterwards that form stays."""

    def __init__(self, rows: int, columns: int, empty: Empty, whole: bool = False) -> None:
        """`whole`: must be a single block."""
        self.rows, self.columns, self.whole = rows, columns, whole
        self._empty = empty
        self._blocks: tuple[Block, ...] = ()

    def __call__(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """x W^T + b + residual: [T, columns] -> [T, rows]; of which dtype: see `kernels.linear.linear`."""
        if len(self._blocks) == 1:
            return linear(x, self._blocks[0], bias, residual, dtype)
        if residual is not None:
            dtype = residual.dtype
        biases = [None] * len(self._blocks) if bias is None else bias.split([rows_of(block) for block in self._blocks])
        parts = zip(self._blocks, biases, strict=True)
        out = torch.cat([linear(x, block, part, dtype=dtype) for block, part in parts], dim=-1)
        return out if residual is None else residual + out

    def swiglu(self, x: Tensor) -> Tensor:
        """silu(g) * u, where [g | u] = x W^T: [T, columns] -> [T, rows / 2]."""
        if len(self._blocks) == 1:
            return swiglu(x, self._blocks[0])
        return silu_gated(self(x))

    def take(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Of a whole matrix: see `kernels.embedding.embed`."""
        return embed(rows, self.block, dtype)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Empty before the matrix has memory."""
        return self._blocks

    @property
    def block(self) -> Block:
        """The only one. Raises ValueError for a matrix in several pieces or without memory."""
        (block,) = self._blocks
        return block

    @property
    def dense(self) -> Tensor:
        """All rows, plain. The first call takes the memory, which is not initialised. Raises ValueError when some are
        packed."""
        if not self._blocks:
            self._blocks = (self.plain(self.rows),)
        if len(self._blocks) > 1 or not isinstance(self._blocks[0], Tensor):
            raise ValueError("the matrix is packed and has no dense form")
        return self._blocks[0]

    def plain(self, rows: int) -> Tensor:
        """Memory for so many rows, not initialised, for a block."""
        return self._empty(rows, self.columns)

    def slot(self, name: str) -> "MatrixSlot":
        """For a tensor that is the whole matrix."""
        return MatrixSlot(name, self, 0, (self.rows, self.columns))

    def bind(self, blocks: Sequence[Block]) -> None:
        """Raises ValueError when they are not the matrix's rows, or not in one piece where they must be."""
        rows = sum(rows_of(block) for block in blocks)
        if rows != self.rows or any(_columns(block) != self.columns for block in blocks):
            raise ValueError(f"{len(blocks)} blocks of {rows} rows; the matrix has {self.rows} x {self.columns}")
        if self.whole and len(blocks) != 1:
            raise ValueError(f"{len(blocks)} blocks; the matrix must be in one")
        self._blocks = tuple(blocks)


@dataclass(frozen=True, slots=True)
class MatrixSlot:
    """A place for one tensor of a checkpoint, named as `transformers` names it, in rows of a matrix."""

    name: str
    matrix: Matrix
    first: int
    """Row."""
    shape: tuple[int, ...]
    """Of the tensor; [..., columns], where the dims before the last make up the rows."""
    parts: tuple["MatrixSlot", ...] = ()
    """The same rows under the names of a checkpoint that stores the tensor in pieces."""

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def target(self) -> Tensor:
        """A view of the matrix's dense form, to be filled with exactly this shape; see there."""
        return self.matrix.dense[self.first : self.first + self.rows].view(self.shape)


Place = Slot | MatrixSlot


def rows_of(block: Block) -> int:
    return len(block) if isinstance(block, Tensor) else block.rows


def _columns(block: Block) -> int:
    return block.shape[1] if isinstance(block, Tensor) else block.columns


def joined(blocks: Sequence[Block]) -> list[Block]:
    """The same rows in as few blocks as there are changes of format among neighbours."""
    runs: list[list[Block]] = []
    for block in blocks:
        if runs and _fits_below(runs[-1][-1], block):
            runs[-1].append(block)
        else:
            runs.append([block])
    return [_stacked(run) for run in runs]


def _fits_below(above: Block, block: Block) -> bool:
    if isinstance(above, Tensor) or isinstance(block, Tensor):
        return isinstance(above, Tensor) and isinstance(block, Tensor)
    if isinstance(above, Weight) and above.format == "fp8-block" and above.rows % FP8_BLOCK:
        return False  # its last scales are of less than a block
    return _kind(above) == _kind(block)


def _kind(block: Weight | GroupedWeight) -> tuple[object, ...]:
    dtypes = {name: tensor.dtype for name, tensor in block.tensors().items()}
    return (block.format if isinstance(block, Weight) else block.layout, block.columns, dtypes)


def _stacked(run: Sequence[Block]) -> Block:
    if len(run) == 1:
        return run[0]
    plain = [block for block in run if isinstance(block, Tensor)]
    if plain:
        return torch.cat(plain)
    packed = [block for block in run if isinstance(block, Weight)]
    return stack(packed) if packed else grouped.stack([block for block in run if isinstance(block, GroupedWeight)])
