"""Products with packed weights on a GPU: which kernel takes how many rows."""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import silu

from kernels.linear.expand import expand
from kernels.linear.launch import STREAM_ROWS, stream_launch, tile_rows
from kernels.linear.packing import unit_columns
from kernels.linear.rows_fp8 import quantize_rows
from kernels.linear.stream import stream
from kernels.linear.weight import Weight


def product(x: Tensor, weight: Weight, residual: Tensor | None, swiglu: bool) -> Tensor:
    """See `kernels.linear.linear` and `kernels.linear.swiglu`."""
    width = weight.rows // 2 if swiglu else weight.rows
    if x.dtype == torch.bfloat16 and 0 < len(x) <= STREAM_ROWS:
        out = torch.empty(len(x), width, dtype=x.dtype if residual is None else residual.dtype, device=x.device)
        processors, capability = _device(x.device)
        launch = stream_launch(
            weight.format, weight.rows, weight.columns, unit_columns(weight.format), len(x), processors, capability
        )
        stream(x, weight, launch, out, residual, swiglu)
        return out
    if x.dtype == torch.bfloat16 and weight.format == "fp8" and _device(x.device)[1] >= (8, 9) and not weight.rows % 16:
        out = _fp8(x, weight)
    else:
        out = _expanded(x, weight)
    if swiglu:
        gate, up = out.chunk(2, dim=-1)
        out = silu(gate) * up
    return out if residual is None else residual + out


def _fp8(x: Tensor, weight: Weight) -> Tensor:
    """On FP8 tensor cores, x quantized per row."""
    assert weight.row_scale is not None
    codes, scales = quantize_rows(x)
    return torch._scaled_mm(
        codes,
        weight.codes.view(torch.float8_e4m3fn).t(),
        scale_a=scales,
        scale_b=weight.row_scale[None, :],
        out_dtype=x.dtype,
        use_fast_accum=True,
    )


def _expanded(x: Tensor, weight: Weight) -> Tensor:
    """Decoded to x's dtype, some rows at a time."""
    out = torch.empty(len(x), weight.rows, dtype=x.dtype, device=x.device)
    step = tile_rows(weight.columns, x.element_size())
    for first in range(0, weight.rows, step):
        count = min(step, weight.rows - first)
        tile = torch.empty(count, weight.columns, dtype=x.dtype, device=x.device)
        expand(weight, first, count, tile)
        torch.mm(x, tile.t(), out=out[:, first : first + count])
    return out


@lru_cache(maxsize=16)
def _device(device: torch.device) -> tuple[int, tuple[int, int]]:
    """Multiprocessors and compute capability."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, (properties.major, properties.minor)
