"""The Triton kernels' launches. As `kernels.norm_rope` says, on a GPU or in Triton's interpreter; `pdl`: begin while
the kernel before still runs, None: where the GPU can. None of them waits for the GPU, and none is compiled anew for
another number of tokens of the same kind (few, or many). Weights and frequencies may be read before the kernel before
has ended: they must have been written long ago."""

from typing import Any, Literal

import torch
from torch import Tensor

from kernels.norm_rope import triton as kernels
from kernels.overlap import overlap
from kernels.vectors import vector_launch, vectors

Kind = Literal["plain", "centred", "gated"]
LONGEST = 1 << 14
"""Elements of a vector that a program holds."""
_BLOCK = 256
_norm: Any = kernels.norm
_angles: Any = kernels.angles


def norm(
    kind: Kind,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    pdl: bool | None = None,
) -> Tensor:
    """`rms_norm` (plain), `rms_norm_centred` or, with a gate, `rms_norm_gated`, of x and gate [..., N] with any
    strides. Returns a contiguous tensor of x's shape. Raises ValueError where the shapes do not fit, and for vectors
    longer than LONGEST."""
    size = x.shape[-1]
    if weight.shape != (size,) or size > LONGEST or (gate is not None) != (kind == "gated"):
        raise ValueError(f"a {kind} norm of {tuple(x.shape)} with weights {tuple(weight.shape)}")
    if gate is not None and gate.shape != x.shape:
        raise ValueError(f"x {tuple(x.shape)}, gate {tuple(gate.shape)}")
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not x.numel():
        return out
    values = vectors(x)
    gates = values if gate is None else vectors(gate)  # not used without a gate
    launch = vector_launch(values.count, size)
    _norm[(-(-values.count // launch.count),)](
        values.tensor, gates.tensor, weight.contiguous(), out, eps, values.count, values.token_stride,
        values.head_stride, gates.token_stride, gates.head_stride, HEADS=values.heads, N=size, WIDE=launch.wide,
        COUNT=launch.count, KIND=kind, num_warps=launch.warps, **overlap(x.device, pdl),
    )  # fmt: skip
    return out


def rotary_angles(positions: Tensor, inverse_frequencies: Tensor, pdl: bool | None = None) -> tuple[Tensor, Tensor]:
    """The exact values of the float32 angles up to 2^20 radians, to 0.51 units of the last place."""
    pairs = len(inverse_frequencies)
    cos, sin = torch.empty(2, len(positions), pairs, dtype=torch.float32, device=positions.device)
    if count := cos.numel():
        _angles[(-(-count // _BLOCK),)](
            positions.contiguous(), inverse_frequencies.contiguous(), cos, sin, count, PAIRS=pairs, BLOCK=_BLOCK,
            num_warps=4, **overlap(cos.device, pdl),
        )  # fmt: skip
    return cos, sin
