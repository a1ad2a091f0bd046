"""GPTQ, of AutoGPTQ, GPTQModel and AutoRound: integers stored as the transposed matrix.

`qweight` int32 [K * bits / 32, N], packed down the columns, lowest bits first; `scales` [groups, N]; `qzeros` int32
[groups, N * bits / 32]; `g_idx` int32 [K], the group of each column, out of order with desc_act. In the first version
of the format zero points are stored with 1 subtracted, from whole words as GPTQModel does it.
"""

from torch import Tensor

from services.engine.weights.readers.bits import unpack
from services.engine.weights.readers.integer import SCALE_KINDS, IntegerShape, group_order, group_size
from services.engine.weights.readers.parts import Matrix
from services.engine.weights.readers.scheme import Scheme

_WORD = 32
_BITS = (2, 4, 8)


class Gptq:
    """An `IntegerSource`."""

    stack = ()

    def __init__(self, matrix: Matrix, declared: Scheme | None, zeros_less_one: bool) -> None:
        self._codes, self._zeros, self.scale_part = (matrix.part(role) for role in ("qweight", "qzeros", "scales"))
        self._less_one = zeros_less_one
        self._codes.expect(("I32",))
        self.scale_part.expect(SCALE_KINDS)
        self._zeros.expect(("I32",))
        if any(len(part.shape) != 2 for part in (self._codes, self._zeros, self.scale_part)):
            raise self._codes.error("and its qzeros and scales must be matrices")
        groups, rows = self.scale_part.shape
        bits = self._zeros.shape[1] * _WORD // rows
        if bits not in _BITS:
            raise self._zeros.error(f"holds zero points of {bits} bits; supported: {', '.join(map(str, _BITS))}")
        self._per_word = _WORD // bits
        columns = self._codes.shape[0] * self._per_word
        self._zeros.expect(("I32",), (groups, -(-rows // self._per_word)))
        self._codes.expect(("I32",), (self._codes.shape[0], rows))
        self.shape = IntegerShape(rows, columns, bits, group_size(self.scale_part, columns, groups, declared))
        self.order = None
        if "g_idx" in matrix.parts:
            self.order = group_order(matrix.parts["g_idx"], self.shape)

    def codes(self, first: int, last: int) -> Tensor:
        return unpack(self._codes.columns(first, last).t(), self.shape.bits, self.shape.columns)

    def scales(self, first: int, last: int) -> Tensor:
        return self.scale_part.columns(first, last).t().contiguous()

    def zeros(self, first: int, last: int) -> Tensor:
        start = first // self._per_word
        words = self._zeros.columns(start, -(-last // self._per_word))
        if self._less_one:
            words = words + sum(1 << place for place in range(0, _WORD, self.shape.bits))
        skip = first - start * self._per_word
        count = words.shape[1] * self._per_word
        return unpack(words, self.shape.bits, count)[:, skip : skip + last - first].t().contiguous()
