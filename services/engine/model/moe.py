"""The mixture of experts in place of the SwiGLU (Qwen3.5-MoE)."""

from functools import partial

import torch
from torch import Tensor

from kernels import moe
from services.engine.model.hybrid_config import ExpertsConfig
from services.engine.model.layers import Empty, Linear, Mlp, Slot


class SparseMlp:
    """The chosen experts' SwiGLUs by their shares, plus sigmoid(W_s x) times that of the shared expert."""

    def __init__(self, hidden: int, config: ExpertsConfig, empty: Empty) -> None:
        self._chosen = config.chosen
        # In half precision the logits of neighbouring ranks would often be equal, and chance choose the expert.
        self._router = Linear(hidden, config.count, False, partial(empty, dtype=torch.float32))
        self._gate_up = empty(config.count, 2 * config.width, hidden)
        self._down = empty(config.count, hidden, config.width)
        self._shared = Mlp(hidden, config.shared_width, empty)
        self._shared_gate = Linear(hidden, 1, False, empty)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        chosen, shares = moe.route(self._router(x.float()), self._chosen)
        routed = moe.experts(x, chosen, shares, self._gate_up, self._down)
        return routed + self._shared_gate(x).sigmoid() * self._shared(x)

    def slots(self, name: str) -> list[Slot]:
        """Checkpoints hold the experts as two tensors, or each expert by itself."""
        width = self._down.shape[-1]
        gates_ups: list[Slot] = []
        downs: list[Slot] = []
        for expert, (gate_up, down) in enumerate(zip(self._gate_up, self._down, strict=True)):
            own = f"{name}.experts.{expert}"
            gates_ups.append(Slot(f"{own}.gate_proj.weight", gate_up[:width]))
            gates_ups.append(Slot(f"{own}.up_proj.weight", gate_up[width:]))
            downs.append(Slot(f"{own}.down_proj.weight", down))
        return [
            *self._router.slots(f"{name}.gate"),
            Slot(f"{name}.experts.gate_up_proj", self._gate_up, tuple(gates_ups)),
            Slot(f"{name}.experts.down_proj", self._down, tuple(downs)),
            *self._shared.slots(f"{name}.shared_expert"),
            *self._shared_gate.slots(f"{name}.shared_expert_gate"),
        ]
