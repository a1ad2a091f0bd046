"""The matrix product that reads every code once: for few rows of x, where the weights' bytes are the time.

A program takes some rows of the matrix, decodes tiles in registers as the left operand of matrix instructions, and x is
the right one. Its warps share the columns, in slices, and add up their sums at the end. Where that does not fill the
GPU evenly the columns are split between programs too: partial sums go to a workspace, and the last program of a tile to
arrive adds them up in their order, so the result does not depend on timing.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kernels.linear import triton as kernels
from kernels.linear.launch import Launch
from kernels.linear.packing import unit_columns
from kernels.linear.quantized import FORMATS
from kernels.linear.weight import Weight

_TILES = 1 << 16
_kernel: Any = kernels.stream


def stream(
    x: Tensor, weight: Weight, launch: Launch, out: Tensor, residual: Tensor | None = None, swiglu: bool = False
) -> None:
    """out = x W^T (+ residual), or silu(g) * u of its two halves.

    x bfloat16 [M, K] with rows of any stride, out [M, N] or, with swiglu, [M, N / 2]; residual like out, with its
    strides. Deterministic: equal calls give equal bits.
    """
    rows, columns, unit = weight.rows, weight.columns, unit_columns(weight.format)
    block_m = max(8, min(128, 1 << (len(x) - 1).bit_length()))
    tiles = -(-rows // launch.rows)
    blocks = -(-len(x) // block_m)
    partial, arrived = out, out  # not used without splits
    if launch.splits > 1:
        if tiles * blocks > _TILES:
            raise ValueError(f"{tiles} x {blocks} tiles with splits; at most {_TILES}")
        partial = x.new_empty(blocks * tiles * launch.splits * launch.rows * block_m, dtype=torch.float32)
        arrived = _arrivals(x.device, _stream_of(x))
    codes = weight.codes.view(torch.int32) if weight.codes.dtype == torch.uint8 else weight.codes
    scales = codes if weight.scales is None else weight.scales
    half = scales.dtype == torch.float16
    if FORMATS[weight.format].integer:
        scales = scales.view(torch.int32)
    _kernel[(tiles, launch.splits, blocks)](
        x, codes, scales, codes if weight.row_scale is None else weight.row_scale,
        out if residual is None else residual, out, partial, arrived, len(x), rows, columns, x.stride(0),
        out.stride(0), codes.stride(0), rows // 2, launch.splits, FORMAT=weight.format, UNIT=unit, BN=launch.rows,
        BM=block_m, SLICES=launch.slices, UNITS=launch.units, SPLIT=launch.splits > 1,
        STAGES=launch.stages, HALF=half, EVEN=columns % (unit * launch.units * launch.slices) == 0, SWIGLU=swiglu,
        RESIDUAL=residual is not None, ASM=x.is_cuda, PDL=launch.pdl,
        num_warps=launch.warps, **({"launch_pdl": True} if launch.pdl else {}),
    )  # fmt: skip


def _stream_of(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


@lru_cache(maxsize=64)
def _arrivals(device: torch.device, stream: int) -> Tensor:
    """A counter a tile, zero between launches. Launches of one stream follow each other, so they share it."""
    return torch.zeros(_TILES, dtype=torch.int32, device=device)
