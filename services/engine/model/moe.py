"""The mixture of experts in place of the SwiGLU (Qwen3.5-MoE)."""

from functools import partial

import torch
from torch import Tensor

from kernels import moe
from services.engine.model.hybrid_config import ExpertsConfig
from services.engine.model.layers import Linear, Mlp
from services.engine.model.matrix import Block, Matrix, MatrixSlot, Place
from services.engine.model.slot import Empty


class SparseMlp:
    """The chosen experts' SwiGLUs by their shares, plus sigmoid(W_s x) times that of the shared expert."""

    def __init__(self, hidden: int, config: ExpertsConfig, empty: Empty) -> None:
        self._chosen = config.chosen
        self._count, self._width, self._hidden = config.count, config.width, hidden
        # In half precision the logits of neighbouring ranks would often be equal, and chance choose the expert.
        self._router = Linear(hidden, config.count, partial(empty, dtype=torch.float32))
        self._gate_up = Matrix(config.count * 2 * config.width, hidden, empty, whole=True)
        self._down = Matrix(config.count * hidden, config.width, empty, whole=True)
        self._shared = Mlp(hidden, config.shared_width, empty)
        self._shared_gate = Linear(hidden, 1, empty)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """x, which the router reads as it is, and residual float32 [T, hidden] -> residual + out, the same."""
        chosen, shares = moe.route(self._router(x), self._chosen)
        x = x.to(self._shared_gate.weight.dtype)
        routed = moe.experts(x, chosen, shares, self._each(self._gate_up), self._each(self._down))
        share = self._shared_gate(x, torch.float32).sigmoid()
        return residual + (routed + share * self._shared(x, dtype=torch.float32))

    def _each(self, matrix: Matrix) -> Block:
        block = matrix.block
        return block.unflatten(0, (self._count, -1)) if isinstance(block, Tensor) else block

    def slots(self, name: str) -> list[Place]:
        """Checkpoints hold the experts as two tensors, or each expert by itself."""
        width, hidden = self._width, self._hidden
        gates_ups: list[MatrixSlot] = []
        downs: list[MatrixSlot] = []
        for expert in range(self._count):
            own = f"{name}.experts.{expert}"
            gate, up, down = 2 * width * expert, 2 * width * expert + width, hidden * expert
            gates_ups.append(MatrixSlot(f"{own}.gate_proj.weight", self._gate_up, gate, (width, hidden)))
            gates_ups.append(MatrixSlot(f"{own}.up_proj.weight", self._gate_up, up, (width, hidden)))
            downs.append(MatrixSlot(f"{own}.down_proj.weight", self._down, down, (hidden, width)))
        gate_up_shape, down_shape = (self._count, 2 * width, hidden), (self._count, hidden, width)
        return [
            *self._router.slots(f"{name}.gate"),
            MatrixSlot(f"{name}.experts.gate_up_proj", self._gate_up, 0, gate_up_shape, tuple(gates_ups)),
            MatrixSlot(f"{name}.experts.down_proj", self._down, 0, down_shape, tuple(downs)),
            *self._shared.slots(f"{name}.shared_expert"),
            *self._shared_gate.slots(f"{name}.shared_expert_gate"),
        ]
