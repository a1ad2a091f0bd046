"""Integer codes with a scale, and perhaps a zero point, for each group of columns, whatever file they come from."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.linear.grouped.form import BITS, Grouped, Layout
from kernels.linear.quantized import FORMATS, Quantized
from services.engine.weights.readers.parts import Part
from services.engine.weights.readers.scaling import scale_groups, shift_groups
from services.engine.weights.readers.scheme import Scheme
from services.engine.weights.source import GROUPED

_OWN = {3: "int3-g128", 4: "int4-g64", 5: "int5-g64", 6: "int6-g64", 7: "int8-g32", 8: "int8-g32"}
"""By bits: the format that holds symmetric codes, where the groups are of a multiple of its own."""
SCALE_KINDS = ("BF16", "F16", "F32")
_DECODED = {"F32": "float32", "BF16": "bf16", "F16": "float16"}
_SMALLEST_GROUP = 16


@dataclass(frozen=True, slots=True)
class IntegerShape:
    rows: int
    columns: int
    bits: int
    group: int
    """Columns that share a scale; as many as there are where all do."""

    @property
    def groups(self) -> int:
        return -(-self.columns // self.group)


class IntegerSource(Protocol):
    """One layout of a file. value[n, k] = (code - zero) * scale of the group of k."""

    @property
    def shape(self) -> IntegerShape: ...

    @property
    def stack(self) -> tuple[int, ...]:
        """(E,) for a stack of experts, of shape.rows in all; () for a matrix."""
        ...

    @property
    def scale_part(self) -> Part: ...

    @property
    def order(self) -> Tensor | None:
        """int64 [K]: the group of each column; None where it is k // group."""
        ...

    def codes(self, first: int, last: int) -> Tensor:
        """uint8 [last - first, K], 0 to 2^bits - 1."""
        ...

    def scales(self, first: int, last: int) -> Tensor:
        """[last - first, groups], of the stored type."""
        ...

    def zeros(self, first: int, last: int) -> Tensor | None:
        """uint8 [last - first, groups]: the codes of the value 0. None: 2^(bits - 1) everywhere."""
        ...


class IntegerMatrix:
    """An `Encoding`: one of our integer formats where it holds codes and scales without loss (coarser groups repeat
    their scale), else `Grouped`; what has its columns in another order (GPTQ with desc_act) is only decoded."""

    def __init__(self, source: IntegerSource) -> None:
        self._source = source
        shape = source.shape
        self._shape = shape
        self._middle = 2 ** (shape.bits - 1)
        lead = source.stack
        rows = shape.rows // lead[0] if lead else shape.rows
        self.shape = (*lead, rows, shape.columns)
        self._known_format: str | None = None
        self._known_symmetric: bool | None = None

    @property
    def scheme(self) -> Scheme:
        return Scheme("int", self._shape.bits, self._shape.group if self._shape.groups > 1 else None)

    @property
    def format(self) -> str:
        if self._known_format is None:
            self._known_format = self._find_format()
        return self._known_format

    def encoded(self, first: int, last: int) -> Quantized | Grouped:
        form = self.format
        if form != GROUPED and form not in FORMATS:
            apart = "that do not lie together" if self._source.order is not None else f", {self._shape.group} each"
            raise self._source.scale_part.error(f"is for groups of columns {apart}: only decoded")
        codes, scales = self._source.codes(first, last), self._scales(first, last)
        if form == GROUPED:
            zeros = None if self._symmetric() else self._source.zeros(first, last)
            return Grouped(
                self._layout(),
                codes,
                scales,
                mins=None if zeros is None else scales,
                # As many bits as the codes: they fit int8 around the middle only.
                sub_mins=None if zeros is None else (zeros - self._middle).contiguous().view(torch.int8),
            )
        group = FORMATS[form].group
        repeats = max(1, self._shape.group // group)
        wide = -(-self._shape.columns // group)
        if self._shape.groups == 1:
            scales = scales.expand(-1, wide).contiguous()
        else:
            scales = scales.repeat_interleave(repeats, dim=1)[:, :wide].contiguous()
        return Quantized(form, (codes - self._middle).view(torch.int8), scales)  # the difference wraps

    def decoded(self, first: int, last: int) -> Tensor:
        values = self._source.codes(first, last).float()
        scales = self._scales(first, last).float()
        zeros = self._source.zeros(first, last)
        order, group = self._source.order, self._shape.group
        if zeros is None:
            values -= self._middle
        elif order is None:
            shift_groups(values, zeros.float(), group)
        else:
            values -= zeros.float()[:, order]
        return scale_groups(values, scales, group) if order is None else values.mul_(scales[:, order])

    def _scales(self, first: int, last: int) -> Tensor:
        return self._source.scale_part.finite(self._source.scales(first, last))

    def _find_format(self) -> str:
        shape = self._shape
        decoded = _DECODED[self._source.scale_part.kind]
        if self._source.order is not None:
            return decoded
        own = _OWN.get(shape.bits)
        if (
            own is not None
            and self._source.scale_part.kind in ("BF16", "F16")
            and (shape.groups == 1 or shape.group % FORMATS[own].group == 0)
            and self._symmetric()
        ):
            return own
        return GROUPED if shape.group >= _SMALLEST_GROUP and self._layout().fits(shape.columns) else decoded

    def _symmetric(self) -> bool:
        # Zero points that all say the same are the rule, and only a look at each one tells.
        if self._known_symmetric is None:
            zeros = self._source.zeros(0, self._shape.rows)
            self._known_symmetric = zeros is None or bool((zeros == self._middle).all())
        return self._known_symmetric

    def _layout(self) -> Layout:
        bits = next(bits for bits in BITS if bits >= self._shape.bits)
        return Layout(bits, self._shape.group, self._shape.group, zero=self._middle)


def group_size(scale: Part, columns: int, groups: int, declared: Scheme | None) -> int:
    """Columns that share a scale, all where there is one group. Raises ModelError when so many groups cannot be."""
    if groups == 1:
        return columns
    sizes = [] if declared is None or declared.group is None else [declared.group]
    # Where no config says it, a power of two is meant; the last group may be a part of one.
    sizes += [2**exponent for exponent in range(3, 13)]
    if groups and columns % groups == 0:
        sizes.append(columns // groups)
    for size in sizes:
        if -(-columns // size) == groups:
            return size
    raise scale.error(f"has {groups} groups, which {columns} columns cannot form")


def group_order(part: Part, shape: IntegerShape) -> Tensor | None:
    """int64 [K]: the group of each column, as `part` names it; None where that is k // group."""
    part.expect(("I32", "I64"), (shape.columns,))
    order = part.whole().long()
    if bool((order == -1).all()):  # never filled in: there is no order
        return None
    if bool((order < 0).any()) or bool((order >= shape.groups).any()):
        raise part.error(f"names groups from {order.min()} to {order.max()}; there are {shape.groups}")
    return None if torch.equal(order, torch.arange(shape.columns) // shape.group) else order
