"""The layer with K and V: full attention with a gated output, as in Qwen3-Next and Qwen3.5."""

import torch
from torch import Tensor

from kernels.elementwise import sigmoid_gated
from kernels.kv_codec import HeadNorm
from services.engine.model.hybrid_config import HybridConfig
from services.engine.model.layers import ForwardContext, Projection, cached_attention, head_norm_slots
from services.engine.model.matrix import Place
from services.engine.model.slot import Empty


class GatedAttention:
    """out = W_o [attention(rope(norm(q)), rope(norm(k)), v) * sigmoid(gate)]; W_q's rows are, head by head, those of
    the query and those of its gate."""

    def __init__(self, config: HybridConfig, layer: int, empty: Empty) -> None:
        """`layer` counts the layers with K and V."""
        self._layer = layer
        self._heads, self._kv_heads, self._dim = config.heads, config.kv_heads, config.head_dim
        self._scale = config.head_dim**-0.5
        self._q_rows, self._kv_rows = 2 * config.heads * config.head_dim, config.kv_heads * config.head_dim
        self._qkv = Projection(config.hidden_size, self._q_rows + 2 * self._kv_rows, False, empty)
        self._output = Projection(config.heads * config.head_dim, config.hidden_size, False, empty)
        self._norm = HeadNorm("centred", empty(config.head_dim), empty(config.head_dim), config.rms_norm_eps)

    def __call__(self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, context: ForwardContext) -> Tensor:
        """x [T, hidden] -> residual + out, float32 [T, hidden]; writes this step's K and V first."""
        wide, k, v = self._qkv(x).split((self._q_rows, self._kv_rows, self._kv_rows), dim=-1)
        q, gate = wide.unflatten(-1, (self._heads, 2 * self._dim)).chunk(2, dim=-1)
        k, v = (part.unflatten(-1, (self._kv_heads, self._dim)) for part in (k, v))
        out = cached_attention(q, k, v, self._norm, cos, sin, self._layer, self._scale, context)
        return self._output(sigmoid_gated(out, gate).flatten(1), residual)

    def slots(self, name: str) -> list[Place]:
        return [
            *self._qkv.slots(f"{name}.q_proj", 0, self._q_rows),
            *self._qkv.slots(f"{name}.k_proj", self._q_rows, self._kv_rows),
            *self._qkv.slots(f"{name}.v_proj", self._q_rows + self._kv_rows, self._kv_rows),
            *self._output.slots(f"{name}.o_proj"),
            *head_norm_slots(self._norm, name),
        ]


def partial_frequencies(config: HybridConfig, device: torch.device) -> Tensor:
    """Radians a position, float32 [rotary_dim / 2].

    The family's multimodal embedding takes each pair's position from one of three axes (time, height, width). In text
    the three are equal, so it is the plain rotary embedding over the first `rotary_dim` dims.
    """
    pairs = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
    return (1.0 / (config.rope_theta**pairs)).to(device)
