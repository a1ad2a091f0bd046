"""Integers of compressed-tensors: pack-quantized (`weight_packed`), int-quantized and naive-quantized (`weight`)."""

import torch
from torch import Tensor

from services.engine.weights.readers.bits import unpack, unpack_down
from services.engine.weights.readers.integer import SCALE_KINDS, IntegerShape, group_order, group_size
from services.engine.weights.readers.parts import Matrix, Part
from services.engine.weights.readers.scheme import Scheme

_WORD = 32


class PackedInts:
    """An `IntegerSource`: of 1 to 8 bits, codes with the offset 2^(bits - 1), dense in the words of each row. The zero
    points of asymmetric ones are packed in the same way, but down the rows."""

    def __init__(self, matrix: Matrix, declared: Scheme | None) -> None:
        self._packed = matrix.part("weight_packed")
        self._packed.expect(("I32",))
        shape = matrix.part("weight_shape")
        shape.expect(("I64", "I32"))
        whole = tuple(shape.whole().reshape(-1).tolist())
        if len(whole) not in (2, 3) or self._packed.shape[:-1] != whole[:-1] or min(whole) < 1:
            raise shape.error(f"is {list(whole)}, but the packed weights have the shape {list(self._packed.shape)}")
        columns = whole[-1]
        bits = _bits(self._packed, columns, declared)
        self.scale_part = matrix.part("weight_scale")
        self.stack = whole[:-2]
        group = _group(self.scale_part, whole, declared)
        rows = whole[-2] * (whole[0] if self.stack else 1)
        self.shape = IntegerShape(rows, columns, bits, group)
        self._zeros = _zero_points(matrix, declared, self.shape, self.stack)
        self.order = _order(matrix, self.shape)

    def codes(self, first: int, last: int) -> Tensor:
        return unpack(self._packed.rows(first, last), self.shape.bits, self.shape.columns)

    def scales(self, first: int, last: int) -> Tensor:
        return _scale_rows(self.scale_part, first, last)

    def zeros(self, first: int, last: int) -> Tensor | None:
        return _zero_rows(self._zeros, self.shape, first, last)


class PlainInts:
    """An `IntegerSource`: one int8 an element, which may use fewer bits by the config."""

    order = None

    def __init__(self, matrix: Matrix, declared: Scheme | None) -> None:
        self._codes = matrix.part("weight")
        self._codes.expect(("I8",))
        whole = self._codes.shape
        if len(whole) not in (2, 3):
            raise self._codes.error(f"has the shape {list(whole)}; expected a matrix or a stack of them")
        self.scale_part = matrix.part("weight_scale")
        self.stack = whole[:-2]
        group = _group(self.scale_part, whole, declared)
        bits = declared.bits if declared is not None and declared.bits is not None else 8
        self.shape = IntegerShape(whole[-2] * (whole[0] if self.stack else 1), whole[-1], bits, group)
        self._zeros = _zero_points(matrix, declared, self.shape, self.stack)

    def codes(self, first: int, last: int) -> Tensor:
        codes = _offset(self._codes.rows(first, last), self.shape.bits)
        if int(codes.amax()) >= 2**self.shape.bits:
            raise self._codes.error(f"holds codes of more than {self.shape.bits} bits, which its config names")
        return codes

    def scales(self, first: int, last: int) -> Tensor:
        return _scale_rows(self.scale_part, first, last)

    def zeros(self, first: int, last: int) -> Tensor | None:
        return _zero_rows(self._zeros, self.shape, first, last)


def _bits(packed: Part, columns: int, declared: Scheme | None) -> int:
    words = packed.shape[-1]
    fitting = [bits for bits in range(1, 9) if -(-columns * bits // _WORD) == words]
    if declared is not None and declared.bits in fitting:
        return declared.bits
    if len(fitting) != 1:  # fewer than 32 columns may fit several
        raise packed.error(f"has {words} words for {columns} columns: no number of bits gives that, or several do")
    return fitting[0]


def _group(scale: Part, whole: tuple[int, ...], declared: Scheme | None) -> int:
    """Columns that share a scale."""
    scale.expect(SCALE_KINDS)
    if scale.size == 1 or scale.shape == whole[:-1]:
        return whole[-1]
    if len(scale.shape) != len(whole) or scale.shape[:-1] != whole[:-1]:
        raise scale.error(f"has the shape {list(scale.shape)}; expected one row of scales for each of {list(whole)}")
    return group_size(scale, whole[-1], scale.shape[-1], declared)


def _scale_rows(scale: Part, first: int, last: int) -> Tensor:
    if scale.size == 1:
        return scale.whole().reshape(1, 1).expand(last - first, 1).contiguous()
    if len(scale.shape) == 1:
        return scale.whole()[first:last, None]
    return scale.rows(first, last)


def _zero_points(matrix: Matrix, declared: Scheme | None, shape: IntegerShape, stack: tuple[int, ...]) -> Part | None:
    if "weight_zero_point" not in matrix.parts and (declared is None or declared.symmetric is not False):
        return None
    zeros = matrix.part("weight_zero_point")
    if stack:
        raise zeros.error("is of a stack of experts; zero points are supported for single matrices only")
    if zeros.kind == "I32":
        zeros.expect(("I32",), (-(-shape.rows * shape.bits // _WORD), shape.groups))
    else:
        zeros.expect(("I8", "I32"), (shape.rows, shape.groups), *([(shape.rows,), (1,)] if shape.groups == 1 else []))
    return zeros


def _zero_rows(zeros: Part | None, shape: IntegerShape, first: int, last: int) -> Tensor | None:
    if zeros is None:
        return None
    if zeros.kind == "I8":
        whole = _offset(zeros.whole(), shape.bits)
        return (whole.expand(shape.rows) if zeros.size == 1 else whole).reshape(shape.rows, -1)[first:last]
    start = first // _WORD * _WORD  # 32 rows end with a word
    words = zeros.rows(start * shape.bits // _WORD, -(-last * shape.bits // _WORD))
    return unpack_down(words, shape.bits, last - start)[first - start :]


def _order(matrix: Matrix, shape: IntegerShape) -> Tensor | None:
    """Old files with activation order name the group of each column."""
    if "weight_g_idx" not in matrix.parts:
        return None
    return group_order(matrix.parts["weight_g_idx"], shape)


def _offset(codes: Tensor, bits: int) -> Tensor:
    """uint8; codes out of range come out as 2^bits and more."""
    return (codes.short() + 2 ** (bits - 1)).to(torch.uint8)
