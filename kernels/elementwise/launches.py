"""The Triton kernels' launches. As `kernels.elementwise` says, on a GPU or in Triton's interpreter; `pdl`: begin while
the kernel before still runs, None: where the GPU can. None of them waits for the GPU, and none is compiled anew for
another number of tokens of the same kind (few, or many)."""

from typing import Any

import torch
from torch import Tensor

from kernels.elementwise import triton as kernels
from kernels.overlap import overlap
from kernels.vectors import vector_launch, vectors

_BLOCK = 1024
"""Elements of a program: 16 bytes a thread, with 4 warps of a half-precision tensor, with 8 of a float32 one."""
_sigmoid_gated: Any = kernels.sigmoid_gated
_silu_gated: Any = kernels.silu_gated
_add: Any = kernels.add


def sigmoid_gated(x: Tensor, gate: Tensor, pdl: bool | None = None) -> Tensor:
    """Raises ValueError where the shapes differ."""
    if x.shape != gate.shape:
        raise ValueError(f"x {tuple(x.shape)}, gate {tuple(gate.shape)}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    values, gates = vectors(x), vectors(gate)
    launch = vector_launch(values.count, values.size)
    _sigmoid_gated[(-(-values.count // launch.count),)](
        values.tensor, gates.tensor, out, values.count, values.token_stride, values.head_stride, gates.token_stride,
        gates.head_stride, HEADS=values.heads, N=values.size, WIDE=launch.wide, COUNT=launch.count,
        num_warps=launch.warps, **overlap(x.device, pdl),
    )  # fmt: skip
    return out


def silu_gated(gate_up: Tensor, pdl: bool | None = None) -> Tensor:
    """Raises ValueError for an odd width."""
    rows, width = gate_up.shape
    if width % 2:
        raise ValueError(f"gate and up share {width} columns")
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    out = torch.empty(rows, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _silu_gated[(rows, -(-width // 2 // _BLOCK))](
            gate_up, out, width // 2, gate_up.stride(0), BLOCK=_BLOCK, num_warps=4, **overlap(out.device, pdl)
        )
    return out


def add(residual: Tensor, x: Tensor, pdl: bool | None = None) -> Tensor:
    """Raises ValueError where the shapes differ."""
    if x.shape != residual.shape:
        raise ValueError(f"residual {tuple(residual.shape)}, x {tuple(x.shape)}")
    dtype = torch.promote_types(residual.dtype, x.dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if count := out.numel():
        _add[(-(-count // _BLOCK),)](
            residual.contiguous(), x.contiguous(), out, count, BLOCK=_BLOCK, num_warps=8, **overlap(out.device, pdl)
        )
    return out
