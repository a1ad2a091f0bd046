"""A quantized matrix in its natural form: one code an element, in the order of the matrix.

What codecs, readers and the pack tool speak; `kernels.linear.weight` turns it into what the kernels read. N: rows
(outputs). K: columns (inputs).

    format     code                          value
    fp8        e4m3 bits, uint8              e4m3(code) * row_scale[n]
    fp8-block  e4m3 bits, uint8              e4m3(code) * scales[n // 128, k // 128]
    nvfp4      e2m1 nibble 0..15, uint8      e2m1(code) * e4m3 scales[n, k // 16] * row_scale[n]
    intB-gG    int8 in -2^(B-1)..2^(B-1)-1   code * scales[n, k // G]

An nvfp4 tensor has one float32 scale; it is kept per row so that parts with different ones can be stacked.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of a nibble: bit 3 is the sign, then 2 bits of exponent and 1 of mantissa (OCP Microscaling Formats 1.0)."""
FP8_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    bits: int
    """Of a code."""
    group: int
    """Columns that share a scale; 0 where there are only row scales."""

    @property
    def integer(self) -> bool:
        return self.name.startswith("int")


FORMATS = {
    format.name: format
    for format in (
        Format("fp8", 8, 0),
        Format("fp8-block", 8, FP8_BLOCK),
        Format("nvfp4", 4, 16),
        Format("int8-g32", 8, 32),
        Format("int6-g64", 6, 64),
        Format("int5-g64", 5, 64),
        Format("int4-g64", 4, 64),
        Format("int3-g128", 3, 128),
    )
}


@dataclass(frozen=True, slots=True)
class Quantized:
    """Raises ValueError when the parts do not fit each other."""

    format: str
    """A key of `FORMATS`."""
    codes: Tensor
    """uint8 or int8 [N, K], see above."""
    scales: Tensor | None = None
    """[N, ceil(K / group)]: bfloat16 or float16 of the integer formats, float8_e4m3fn of nvfp4. fp8-block: float32 or
    bfloat16 [ceil(N / 128), ceil(K / 128)]. None for fp8."""
    row_scale: Tensor | None = None
    """float32 [N] of fp8 and nvfp4, else None."""

    def __post_init__(self) -> None:
        form = FORMATS.get(self.format)
        if form is None:
            raise ValueError(f"format {self.format!r} is unknown; known: {', '.join(FORMATS)}")
        rows, columns = self.codes.shape
        dtype = torch.int8 if form.integer else torch.uint8
        if self.codes.dtype != dtype:
            raise ValueError(f"codes of {self.format} are {self.codes.dtype}; expected {dtype}")
        groups = -(-columns // form.group) if form.group else 0
        high = -(-rows // FP8_BLOCK) if self.format == "fp8-block" else rows
        if (None if self.scales is None else tuple(self.scales.shape)) != ((high, groups) if groups else None):
            raise ValueError(f"scales of {self.format} for {rows} x {columns} must be [{high}, {groups}]")
        if (self.row_scale is not None) != (self.format in ("fp8", "nvfp4")):
            raise ValueError(f"row_scale belongs to fp8 and nvfp4 only, not to {self.format}")
        if self.row_scale is not None and self.row_scale.shape != (rows,):
            raise ValueError(f"row_scale must be [{rows}], not {list(self.row_scale.shape)}")

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        return self.codes.shape[1]


def dequantize(quantized: Quantized) -> Tensor:
    """float32 [N, K], each value rounded once (from exact products of code and scales) or exact."""
    form = FORMATS[quantized.format]
    codes = quantized.codes
    rows, columns = codes.shape
    if form.integer:
        values = codes.float()
    elif quantized.format == "nvfp4":
        values = torch.tensor(E2M1, device=codes.device)[codes.long()]
    else:
        values = codes.view(torch.float8_e4m3fn).float()
    if quantized.scales is not None:
        scales = quantized.scales.float().repeat_interleave(form.group, dim=1)[:, :columns]
        if quantized.format == "fp8-block":
            scales = scales.repeat_interleave(FP8_BLOCK, dim=0)[:rows]
        values = values * scales
    if quantized.row_scale is not None:
        values = values * quantized.row_scale[:, None]
    return values
