"""AWQ's 4-bit integers for its `gemm` kernels: stored as the transposed matrix.

`qweight` int32 [K, N / 8], `qzeros` int32 [groups, N / 8], `scales` [groups, N]. The nibbles of a
word are those of its outputs 0, 2, 4, 6, 1, 3, 5, 7, from the lowest bits on.
"""

from torch import Tensor

from services.engine.weights.readers.bits import unpack
from services.engine.weights.readers.integer import SCALE_KINDS, IntegerShape, group_size
from services.engine.weights.readers.parts import Matrix, Part
from services.engine.weights.readers.scheme import Scheme

_BITS = 4
_PER_WORD = 8
_NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]
"""By output of the eight of a word: its nibble, counted from the lowest bits."""


class Awq:
    """An `IntegerSource`."""

    stack = ()
    order = None

    def __init__(self, matrix: Matrix, declared: Scheme | None) -> None:
        self._codes, self._zeros, self.scale_part = (matrix.part(role) for role in ("qweight", "qzeros", "scales"))
        self.scale_part.expect(SCALE_KINDS)
        if len(self.scale_part.shape) != 2 or len(self._codes.shape) != 2 or self.scale_part.shape[1] % _PER_WORD:
            raise self._codes.error(f"and its scales must be matrices, with a multiple of {_PER_WORD} outputs")
        groups, rows = self.scale_part.shape
        columns = self._codes.shape[0]
        self._codes.expect(("I32",), (columns, rows // _PER_WORD))
        self._zeros.expect(("I32",), (groups, rows // _PER_WORD))
        self.shape = IntegerShape(rows, columns, _BITS, group_size(self.scale_part, columns, groups, declared))

    def codes(self, first: int, last: int) -> Tensor:
        return _nibbles(self._codes, first, last)

    def scales(self, first: int, last: int) -> Tensor:
        return self.scale_part.columns(first, last).t().contiguous()

    def zeros(self, first: int, last: int) -> Tensor:
        return _nibbles(self._zeros, first, last)


def _nibbles(part: Part, first: int, last: int) -> Tensor:
    """uint8 [last - first, height of `part`]."""
    start = first // _PER_WORD
    words = part.columns(start, -(-last // _PER_WORD))
    height, width = words.shape
    nibbles = unpack(words.t(), _BITS, height * _PER_WORD).view(width, height, _PER_WORD)
    codes = nibbles.transpose(1, 2)[:, _NIBBLES].flatten(0, 1)
    return codes[first - start * _PER_WORD :][: last - first]
