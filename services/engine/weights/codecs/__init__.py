"""From float32 to the formats of `kernels.linear.quantized` (the way back is its `dequantize`)."""

import torch
from torch import Tensor

from kernels.linear.quantized import FORMATS, Quantized
from services.engine.weights.codecs import fp8, integers, nvfp4

SCALE_DTYPES = {
    "fp8-block": torch.float32,
    **{name: torch.bfloat16 for name, form in FORMATS.items() if form.integer},
}
"""Of the formats that leave a choice, what they get where nobody chose. bfloat16 has the range of the weights."""


def encode(
    values: Tensor, format: str, scale_dtype: torch.dtype | None = None, largest: Tensor | float | None = None
) -> Quantized:
    """The closest of `format` to `values`, float32 [N, K] on any device; where the scales leave a choice, that of least
    squared error among a few. Deterministic, and each row (fp8-block: each 128 rows) by itself, so that a matrix may be
    encoded in pieces; nvfp4 alone must then be told `largest`, the greatest magnitude of the whole matrix (a number, or
    [N] of the rows' own matrices).

    `encode(dequantize(q))` has the values of q, and its codes and scales too, when q is a result of `encode` (for nvfp4
    with the same `largest`). Two kinds of groups can be written in two ways, and come back in the one that is tried
    first: integers with a common factor (all even, say), and nvfp4 groups that are exact under two scales.

    Raises ValueError for an unknown format, values that are not finite, and scales that float16 cannot hold.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is unknown; known: {', '.join(FORMATS)}")
    low, high = values.aminmax() if values.numel() else (values.new_zeros(()), values.new_zeros(()))
    if not (low.isfinite() and high.isfinite()):
        raise ValueError("values are not finite")
    if format == "fp8":
        return fp8.encode_rows(values)
    if format == "nvfp4":
        return nvfp4.encode(values, torch.maximum(-low, high) if largest is None else largest)
    kind = scale_dtype or SCALE_DTYPES[format]
    return fp8.encode_blocks(values, kind) if format == "fp8-block" else integers.encode(values, format, kind)
