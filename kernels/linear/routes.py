"""Products with packed weights on a GPU: which kernel takes how many rows."""

from functools import lru_cache

import torch
from torch import Tensor

from kernels.elementwise import add, silu_gated
from kernels.gpu import gpu
from kernels.linear.expand import expand
from kernels.linear.launch import STREAM_ROWS, stream_launch, tile_rows
from kernels.linear.packing import unit_columns
from kernels.linear.rows_fp8 import quantize_rows
from kernels.linear.stream import stream
from kernels.linear.weight import Weight


def product(x: Tensor, weight: Weight, residual: Tensor | None, dtype: torch.dtype, swiglu: bool) -> Tensor:
    """Returns `dtype`; see `kernels.linear.linear` and `kernels.linear.swiglu`."""
    width, at = weight.rows // 2 if swiglu else weight.rows, gpu(x.device)
    if x.dtype == torch.bfloat16 and 0 < len(x) <= STREAM_ROWS:
        out = torch.empty(len(x), width, dtype=dtype, device=x.device)
        launch = stream_launch(
            weight.format,
            weight.rows,
            weight.columns,
            unit_columns(weight.format),
            len(x),
            at.processors,
            at.capability,
        )
        stream(x, weight, launch, out, residual, swiglu)
        return out
    # What is gated or added once more is read again, so it is kept short.
    kept = dtype if dtype == torch.float32 and residual is None and not swiglu else x.dtype
    if x.dtype == torch.bfloat16 and weight.format == "fp8" and at.capability >= (8, 9) and not weight.rows % 16:
        out = _fp8(x, weight, kept)
    else:
        out = _expanded(x, weight, kept)
    if swiglu:
        out = silu_gated(out)
    return (out if residual is None else add(residual, out)).to(dtype)


def _fp8(x: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    """On FP8 tensor cores, x quantized per row. Returns `dtype` where torch can, else x's."""
    assert weight.row_scale is not None
    codes, scales = quantize_rows(x)
    return torch._scaled_mm(
        codes,
        weight.codes.view(torch.float8_e4m3fn).t(),
        scale_a=scales,
        scale_b=weight.row_scale[None, :],
        out_dtype=dtype if _writes_float32(x.device) else x.dtype,
        use_fast_accum=True,
    )


def _expanded(x: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    """Decoded to x's dtype, some rows at a time. Returns `dtype`, x's or float32."""
    out = torch.empty(len(x), weight.rows, dtype=dtype, device=x.device)
    step = tile_rows(weight.columns, x.element_size())
    for first in range(0, weight.rows, step):
        count = min(step, weight.rows - first)
        tile = torch.empty(count, weight.columns, dtype=x.dtype, device=x.device)
        expand(weight, first, count, tile)
        part = out[:, first : first + count]
        if dtype == x.dtype:
            torch.mm(x, tile.t(), out=part)
        else:
            torch.mm(x, tile.t(), out_dtype=dtype, out=part)
    return out


@lru_cache(maxsize=16)
def _writes_float32(device: torch.device) -> bool:
    """Whether FP8 products with scales per row may have float32 results: cuBLAS 12.9 has them for compute capability
    9.0, CUTLASS, which torch takes elsewhere, not."""
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return gpu(device).capability == (9, 0) and version >= (12, 9)
