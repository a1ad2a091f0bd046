"""A matrix quantized in groups of columns, in its natural form: what no entry of `kernels.linear.quantized.FORMATS`
holds without loss (most GGUF types; integers with a zero point, or of other group sizes).

    value[n, k] = v(codes[n, k]) * scale[n, k // group] - min[n, k // group]
    v(code)     = table[code], or code - zero where there is no table
    scale[n, j] = scales[n, j * group // span] * sub_scales[n, j]       sub_scales: 1 where absent
    min[n, j]   = mins[n, j * group // span] * sub_mins[n, j]           0 without mins, sub_mins: 1 where absent

N: rows (outputs). K: columns (inputs). Examples:

    GGUF Q4_0               4 bits, group 32, zero 8, scales float16 d
    GGUF Q4_K               4 bits, group 32, span 256, scales float16 d, sub_scales 0..63, mins dmin, sub_mins 0..63
    GGUF IQ4_XS             4 bits, group 32, span 256, a table of 16, scales d, sub_scales -32..31
    int4 with zero points z 4 bits, group = span = 128, scales s, mins s (the same tensor), sub_mins z
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
"""Columns that the packed form keeps together: groups must fit into it evenly, or it into them."""
BITS = (1, 2, 3, 4, 5, 6, 8)
_TABLE_BITS = 4
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Layout:
    """What all parts of a matrix share. Raises ValueError when it makes no sense."""

    bits: int
    """Of a code: one of BITS."""
    group: int
    """Columns that share a scale and a min: 16, 32, 64, 128, a multiple of 128, or all columns (a number >= K)."""
    span: int
    """Columns that share an entry of `scales` and `mins`: `group` or a multiple of it, and of the same kind."""
    zero: int = 0
    """Code of the value 0, 0..2^bits - 1; 0 where there is a table."""
    table: tuple[int, ...] = ()
    """2^bits values in -128..127; at most 4 bits may have one."""

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"codes have {self.bits} bits; known: {', '.join(map(str, BITS))}")
        if self.group < 16 or self.span % self.group:
            raise ValueError(f"group {self.group} must be at least 16 and divide span {self.span}")
        if self.table and (self.bits > _TABLE_BITS or len(self.table) != 2**self.bits or self.zero):
            raise ValueError(f"a table of {len(self.table)} values and zero {self.zero} do not fit {self.bits} bits")
        if not all(-128 <= value <= 127 for value in self.table) or not 0 <= self.zero < 2**self.bits:
            raise ValueError(f"zero {self.zero} or table {self.table} is out of range")

    def fits(self, columns: int) -> bool:
        """Whether blocks and groups never cut each other in a matrix of so many columns."""
        return all(BLOCK % size == 0 or size % BLOCK == 0 or size >= columns for size in (self.group, self.span))


@dataclass(frozen=True, slots=True)
class Grouped:
    """Raises ValueError when the parts do not fit each other."""

    layout: Layout
    codes: Tensor
    """uint8 [N, K], 0..2^bits - 1."""
    scales: Tensor
    """[N, ceil(K / span)], float16, bfloat16 or float32."""
    sub_scales: Tensor | None = None
    """int8 [N, ceil(K / group)]. None: all 1; then span must be group."""
    mins: Tensor | None = None
    """Like scales, of any of the three dtypes."""
    sub_mins: Tensor | None = None
    """Like sub_scales."""

    def __post_init__(self) -> None:
        layout = self.layout
        if self.codes.dtype != torch.uint8 or self.codes.dim() != 2:
            raise ValueError(f"codes are {self.codes.dtype} {list(self.codes.shape)}; expected uint8 [N, K]")
        rows, columns = self.codes.shape
        if not layout.fits(columns):
            raise ValueError(f"groups of {layout.group} and {layout.span} columns do not fit blocks of {BLOCK}")
        for name, tensor, size in (("scales", self.scales, layout.span), ("mins", self.mins, layout.span)):
            if tensor is not None and (tensor.dtype not in _FLOATS or tensor.shape != (rows, -(-columns // size))):
                raise ValueError(
                    f"{name} are {tensor.dtype} {list(tensor.shape)}; expected floats [{rows}, {-(-columns // size)}]"
                )
        for name, tensor in (("sub_scales", self.sub_scales), ("sub_mins", self.sub_mins)):
            groups = -(-columns // layout.group)
            if tensor is not None and (tensor.dtype != torch.int8 or tensor.shape != (rows, groups)):
                raise ValueError(f"{name} are {tensor.dtype} {list(tensor.shape)}; expected int8 [{rows}, {groups}]")
        if layout.span != layout.group and (
            self.sub_scales is None or (self.mins is not None and self.sub_mins is None)
        ):
            raise ValueError("a span of several groups needs sub_scales, and sub_mins where there are mins")
        if self.mins is None and self.sub_mins is not None:
            raise ValueError("sub_mins without mins")

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        return self.codes.shape[1]


def values(layout: Layout, codes: Tensor) -> Tensor:
    """v(codes), float32 of the same shape."""
    if layout.table:
        return torch.tensor(layout.table, dtype=torch.float32, device=codes.device)[codes.long()]
    return codes.float() - layout.zero


def dequantize(grouped: Grouped) -> Tensor:
    """float32 [N, K]. Exact but for the subtraction of a min, which rounds once, as long as the products of code, scale
    and sub-scale fit 24 bits: so it is for all GGUF types, and for integers with a float16 or bfloat16 scale."""
    layout = grouped.layout
    columns = grouped.columns
    scale = _factor(grouped.scales, grouped.sub_scales, layout, columns)
    result = values(layout, grouped.codes) * scale
    if grouped.mins is not None:
        result -= _factor(grouped.mins, grouped.sub_mins, layout, columns)
    return result


def _factor(coarse: Tensor, fine: Tensor | None, layout: Layout, columns: int) -> Tensor:
    wide = _spread(coarse, layout.span, columns)
    return wide if fine is None else wide * _spread(fine, layout.group, columns)


def _spread(factors: Tensor, size: int, columns: int) -> Tensor:
    return factors.float().repeat_interleave(min(size, columns), dim=1)[:, :columns]
