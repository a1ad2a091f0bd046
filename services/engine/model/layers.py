"""The parts of a decoder: plain tensors and the functions that use them. Attention and Block are the dense one's."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import kv_codec, norm_rope
from kernels.attention import AttentionPlan, paged_attention
from kernels.gated_delta.net import Records
from kernels.kv_codec import HeadNorm, LayerKv
from kernels.linear import linear
from kernels.state_plan import ReplayRows, StatePlan
from services.engine.model.config import ModelConfig
from services.engine.model.matrix import Matrix, MatrixSlot, Place
from services.engine.model.slot import Empty, Slot


@dataclass(frozen=True, slots=True)
class Replay:
    """Of a step that only looks ahead: where what moves the states on is kept."""

    rows: ReplayRows
    records: Records


@dataclass(frozen=True, slots=True)
class RecurrentContext:
    """What the layers with a state know of a step; the tensors are views of the state pool, written in place."""

    plan: StatePlan
    states: Tensor
    """float32 [slots, delta net layers, value_heads, key_dim, value_dim]."""
    columns: Tensor
    """[slots, delta net layers, conv_width - 1, channels]: the convolution's last inputs, oldest first."""
    hidden: Tensor
    """[slots, hidden]: of the sequence's last token, behind the final norm."""
    last: Tensor
    """int64 [R]: the last token of each row that runs any,"""
    slots: Tensor
    """int64 [R]: and the slot of its sequence."""
    sampled: Tensor
    """int64 [S]: slots of the rows whose logits are wanted. They are taken from `hidden`, so a row needs no token."""
    replay: Replay | None = None
    """Set: states and columns stay as they are (`HybridDecoder.verify`), and `plan` is not used."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """All that a forward pass knows beside its tokens. T tokens of all rows of a step follow each other."""

    positions: Tensor
    """int64 [T], absolute in each token's sequence."""
    attention: AttentionPlan
    cache: Sequence[LayerKv]
    """The page pool, layer by layer; written in place."""
    pages: Tensor
    """int64 [T]: the page that K and V of each token go to, negative where they are there already,"""
    offsets: Tensor
    """int64 [T]: and its place there."""
    outputs: Tensor
    """int64 [S]: the tokens whose logits are wanted."""
    recurrent: RecurrentContext | None = None
    """None for a model without states; with it `outputs` is not used."""


class Linear:
    """y = x W^T; W is [outputs, inputs], always plain: for those too small to be worth packing. Several projections of
    the same input may be stacked in one."""

    def __init__(self, inputs: int, outputs: int, empty: Empty) -> None:
        self.weight = empty(outputs, inputs)

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return linear(x, self.weight, dtype=dtype)

    def slots(self, name: str, first: int = 0, count: int | None = None) -> list[Place]:
        """Of the projection that takes the outputs [first, first + count)."""
        return [Slot(f"{name}.weight", self.weight[first : None if count is None else first + count])]


class Projection:
    """y = x W^T + b; W is [outputs, inputs], plain or packed. Several projections of the same input may be stacked in
    one."""

    def __init__(self, inputs: int, outputs: int, bias: bool, empty: Empty) -> None:
        self.weight = Matrix(outputs, inputs, empty)
        self.bias = empty(outputs) if bias else None

    def __call__(self, x: Tensor, residual: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """y + residual; of which dtype: see `kernels.linear.linear`."""
        return self.weight(x, self.bias, residual, dtype)

    def slots(self, name: str, first: int = 0, count: int | None = None) -> list[Place]:
        """Of the projection that takes the outputs [first, first + count)."""
        rows = self.weight.rows - first if count is None else count
        slots: list[Place] = [MatrixSlot(f"{name}.weight", self.weight, first, (rows, self.weight.columns))]
        if self.bias is not None:
            slots.append(Slot(f"{name}.bias", self.bias[first : first + rows]))
        return slots


class RmsNorm:
    def __init__(self, size: int, eps: float, empty: Empty) -> None:
        self.weight = empty(size)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return norm_rope.rms_norm(x, self.weight, self._eps)

    def slots(self, name: str) -> list[Place]:
        return [Slot(f"{name}.weight", self.weight)]


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norm: HeadNorm | None,
    cos: Tensor,
    sin: Tensor,
    layer: int,
    scale: float,
    context: ForwardContext,
) -> Tensor:
    """Norms and turns q [T, heads, dim] and k [T, kv_heads, dim], writes k and v to the pages as those of `layer`
    (counted among the layers that have K and V), then attends. Returns a tensor like q."""
    kv = context.cache[layer]
    q = kv_codec.store(kv, q, k, v, norm, cos, sin, context.pages, context.offsets)
    return paged_attention(q, kv, context.attention, scale)


class CentredRmsNorm(RmsNorm):
    """With the weight 1 + w."""

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x of any float dtype; the result is of `dtype`, or of the weight's."""
        return norm_rope.rms_norm_centred(x, self.weight, self._eps, dtype or self.weight.dtype)


class Attention:
    def __init__(self, config: ModelConfig, layer: int, empty: Empty) -> None:
        self._layer = layer
        self._heads, self._kv_heads, self._dim = config.heads, config.kv_heads, config.head_dim
        self._scale = config.head_dim**-0.5
        rows = (config.heads + 2 * config.kv_heads) * config.head_dim
        self._qkv = Projection(config.hidden_size, rows, config.qkv_bias, empty)
        self._output = Projection(config.heads * config.head_dim, config.hidden_size, config.output_bias, empty)
        self._norm = (
            HeadNorm("plain", empty(config.head_dim), empty(config.head_dim), config.rms_norm_eps)
            if config.qk_norm
            else None
        )

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, context: ForwardContext) -> Tensor:
        """x [T, hidden] -> [T, hidden]; writes this step's K and V first."""
        heads = self._qkv(x).unflatten(-1, (-1, self._dim))
        q, k, v = heads.split((self._heads, self._kv_heads, self._kv_heads), dim=1)
        out = cached_attention(q, k, v, self._norm, cos, sin, self._layer, self._scale, context)
        return self._output(out.flatten(1))

    def slots(self, name: str) -> list[Place]:
        q_rows, kv_rows = self._heads * self._dim, self._kv_heads * self._dim
        slots: list[Place] = [
            *self._qkv.slots(f"{name}.q_proj", 0, q_rows),
            *self._qkv.slots(f"{name}.k_proj", q_rows, kv_rows),
            *self._qkv.slots(f"{name}.v_proj", q_rows + kv_rows, kv_rows),
            *self._output.slots(f"{name}.o_proj"),
        ]
        if self._norm is not None:
            slots += head_norm_slots(self._norm, name)
        return slots


def head_norm_slots(norm: HeadNorm, name: str) -> list[Place]:
    return [Slot(f"{name}.q_norm.weight", norm.q_weight), Slot(f"{name}.k_norm.weight", norm.k_weight)]


class Mlp:
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, width: int, empty: Empty) -> None:
        self._width = width
        self._gate_up = Projection(hidden, 2 * width, False, empty)
        self._down = Projection(width, hidden, False, empty)

    def __call__(self, x: Tensor, residual: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Plus residual; of which dtype: see `kernels.linear.linear`."""
        return self._down(self._gate_up.weight.swiglu(x), residual, dtype)

    def slots(self, name: str) -> list[Place]:
        return [
            *self._gate_up.slots(f"{name}.gate_proj", 0, self._width),
            *self._gate_up.slots(f"{name}.up_proj", self._width, self._width),
            *self._down.slots(f"{name}.down_proj"),
        ]


class Block:
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, empty: Empty) -> None:
        self._name = f"model.layers.{layer}"
        self._attention_norm = RmsNorm(config.hidden_size, config.rms_norm_eps, empty)
        self._attention = Attention(config, layer, empty)
        self._mlp_norm = RmsNorm(config.hidden_size, config.rms_norm_eps, empty)
        self._mlp = Mlp(config.hidden_size, config.intermediate_size, empty)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, context: ForwardContext) -> Tensor:
        x = x + self._attention(self._attention_norm(x), cos, sin, context)
        return x + self._mlp(self._mlp_norm(x))

    def slots(self) -> list[Place]:
        return [
            *self._attention_norm.slots(f"{self._name}.input_layernorm"),
            *self._attention.slots(f"{self._name}.self_attn"),
            *self._mlp_norm.slots(f"{self._name}.post_attention_layernorm"),
            *self._mlp.slots(f"{self._name}.mlp"),
        ]


def inverse_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Radians a position, float32 [head_dim / 2], rounded as `transformers` rounds them."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope.theta**pairs)
    if config.rope.divisors:
        frequencies = frequencies / torch.tensor(config.rope.divisors, dtype=torch.float32)
    return frequencies.to(device)
