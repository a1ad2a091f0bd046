"""Plain torch, any device: the oracle."""

from torch import Tensor
from torch.nn.functional import silu


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    return (x * gate.sigmoid()).to(x.dtype)


def silu_gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def add(residual: Tensor, x: Tensor) -> Tensor:
    return residual + x
