"""The layer with a recurrent state: gated delta net (Yang et al. 2024), as in Qwen3-Next and Qwen3.5."""

import torch
from torch import Tensor

from kernels import norm_rope
from kernels.gated_delta import decode, prefill, verify
from kernels.gated_delta.net import NetInputs, NetWeights
from services.engine.model.hybrid_config import HybridConfig
from services.engine.model.layers import Linear, Projection, RecurrentContext
from services.engine.model.matrix import Place
from services.engine.model.slot import Empty, Slot


def inner_dtype(model: torch.dtype) -> torch.dtype:
    """Of q, k, v and o, in a model of this dtype.

    float16 has three bits more than bfloat16 in the same space. Its range suffices: the convolution's inputs come from
    a normed vector, far below 65504, and q, k and o go through norms, whose epsilon hides what float16 makes zero."""
    return torch.float32 if model == torch.float32 else torch.float16


class GatedDeltaNet:
    """out = W_o [rmsnorm(o) * silu(z)]; o by the gated delta rule from q, k, v = conv(W_qkv x), with the logarithm of
    the decay g = -e^A_log softplus(W_a x + dt_bias) and beta = sigmoid(W_b x)."""

    def __init__(self, config: HybridConfig, layer: int, empty: Empty) -> None:
        """`layer` counts the layers with a state."""
        net = config.delta_net
        self._layer = layer
        self._net = net
        self._eps = config.rms_norm_eps
        self._value_width = net.value_heads * net.value_dim
        self._qkv_z = Projection(config.hidden_size, net.channels + self._value_width, False, empty)
        self._b_a = Linear(config.hidden_size, 2 * net.value_heads, empty)
        self._taps = empty(net.conv_width, net.channels)
        # Whatever the file holds: e^A_log multiplies the logarithm of a decay over thousands of tokens.
        self._a_log = empty(net.value_heads, dtype=torch.float32)
        self._dt_bias = empty(net.value_heads, dtype=torch.float32)
        self._weights = NetWeights(self._taps, self._a_log, self._dt_bias, net.key_heads, net.key_dim, net.value_dim)
        self._norm = empty(net.value_dim)
        self._output = Projection(self._value_width, config.hidden_size, False, empty)

    def __call__(self, x: Tensor, residual: Tensor, context: RecurrentContext) -> Tensor:
        """x [T, hidden] -> residual + out, float32 [T, hidden]; moves the states of the step's sequences on."""
        net = self._net
        mixed, z = self._qkv_z(x, dtype=torch.float32).split((net.channels, self._value_width), dim=-1)
        b, a = self._b_a(x, torch.float32).chunk(2, dim=-1)
        o = self._recurrence(NetInputs(mixed, a, b), context, inner_dtype(x.dtype))
        gate = z.unflatten(-1, (net.value_heads, net.value_dim))
        return self._output(norm_rope.rms_norm_gated(o, gate, self._norm, self._eps, x.dtype).flatten(1), residual)

    def _recurrence(self, inputs: NetInputs, context: RecurrentContext, inner: torch.dtype) -> Tensor:
        """o of dtype `inner` [T, value_heads, value_dim]. Sequences with one token go from the convolution to
        o at once, longer ones in chunks."""
        plan, replay = context.plan, context.replay
        columns, states = context.columns[:, self._layer], context.states[:, self._layer]
        if replay is not None or plan.packed is None:
            shape = (len(inputs.mixed), self._net.value_heads, self._net.value_dim)
            o = torch.empty(shape, dtype=inner, device=inputs.mixed.device)
        else:
            o = prefill(inputs, self._weights, columns, states, plan, inner)
        if replay is not None:
            verify(inputs, self._weights, columns, states, replay.rows, replay.records, self._layer, o)
        elif len(plan.singles):
            decode(inputs, self._weights, columns, states, plan.slots, plan.singles, o)
        return o

    @property
    def weights(self) -> NetWeights:
        """Of the recurrent part; what they are filled with changes, the tensors do not."""
        return self._weights

    def slots(self, name: str) -> list[Place]:
        heads = self._net.value_heads
        return [
            *self._qkv_z.slots(f"{name}.in_proj_qkv", 0, self._net.channels),
            *self._qkv_z.slots(f"{name}.in_proj_z", self._net.channels, self._value_width),
            *self._b_a.slots(f"{name}.in_proj_b", 0, heads),
            *self._b_a.slots(f"{name}.in_proj_a", heads, heads),
            Slot(f"{name}.conv1d.weight", self._taps.t()[:, None]),
            Slot(f"{name}.A_log", self._a_log),
            Slot(f"{name}.dt_bias", self._dt_bias),
            Slot(f"{name}.norm.weight", self._norm),
            *self._output.slots(f"{name}.out_proj"),
        ]
