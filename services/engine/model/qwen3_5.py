"""The hybrid decoder of the Qwen3.5 family, dense and mixture-of-experts."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernels import gated_delta, norm_rope
from kernels.gated_delta.net import NetWeights, Records, empty_records
from kernels.kv_codec import kernels_take
from services.engine.model.attention import GatedAttention, partial_frequencies
from services.engine.model.gated_delta_net import GatedDeltaNet, inner_dtype
from services.engine.model.hybrid_config import HybridConfig
from services.engine.model.layers import CentredRmsNorm, ForwardContext, Mlp, RecurrentContext
from services.engine.model.matrix import Matrix, Place
from services.engine.model.moe import SparseMlp
from services.engine.model.slot import Empty


class HybridBlock:
    """One layer: x + mixer(norm(x)), then x + mlp(norm(x)); the mixer is attention or a gated delta net.

    x stays float32 over all layers, whatever the weights are: each layer adds little to it, and rounds only what its
    matrices read and what is cached."""

    def __init__(self, config: HybridConfig, name: str, mixer: GatedAttention | GatedDeltaNet, empty: Empty) -> None:
        self._name = name
        self._mixer = mixer
        self._mixer_norm = CentredRmsNorm(config.hidden_size, config.rms_norm_eps, empty)
        self._mlp_norm = CentredRmsNorm(config.hidden_size, config.rms_norm_eps, empty)
        self._mlp = (
            Mlp(config.hidden_size, config.mlp, empty)
            if isinstance(config.mlp, int)
            else SparseMlp(config.hidden_size, config.mlp, empty)
        )

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, context: ForwardContext) -> Tensor:
        """float32 [T, hidden] -> the same."""
        normed = self._mixer_norm(x)
        if isinstance(self._mixer, GatedAttention):
            x = self._mixer(normed, x, cos, sin, context)
        else:
            x = self._mixer(normed, x, _recurrent(context))
        if isinstance(self._mlp, SparseMlp):
            return self._mlp(self._mlp_norm(x, torch.float32), x)
        return self._mlp(self._mlp_norm(x), x)

    @property
    def net(self) -> NetWeights | None:
        """None where the mixer is attention."""
        return self._mixer.weights if isinstance(self._mixer, GatedDeltaNet) else None

    def slots(self) -> list[Place]:
        kind = "self_attn" if isinstance(self._mixer, GatedAttention) else "linear_attn"
        return [
            *self._mixer_norm.slots(f"{self._name}.input_layernorm"),
            *self._mixer.slots(f"{self._name}.{kind}"),
            *self._mlp_norm.slots(f"{self._name}.post_attention_layernorm"),
            *self._mlp.slots(f"{self._name}.mlp"),
        ]


class HybridDecoder:
    """Weights on one device. Its memory is not initialised: every slot must be filled before the first forward."""

    def __init__(self, config: HybridConfig, dtype: torch.dtype, device: torch.device) -> None:
        empty = partial(torch.empty, dtype=dtype, device=device)
        self.config = config
        self.dtype = dtype
        self.device = device
        self._embedding = Matrix(config.vocab_size, config.hidden_size, empty, whole=True)
        self._blocks = _blocks(config, empty)
        self._norm = CentredRmsNorm(config.hidden_size, config.rms_norm_eps, empty)
        self._head = self._embedding if config.tied_head else Matrix(config.vocab_size, config.hidden_size, empty)
        self._frequencies = partial_frequencies(config, device)

    def slots(self) -> Iterator[Place]:
        """Everything that a checkpoint must bring."""
        yield self._embedding.slot("model.embed_tokens.weight")
        for block in self._blocks:
            yield from block.slots()
        yield from self._norm.slots("model.norm")
        if not self.config.tied_head:
            yield self._head.slot("lm_head.weight")

    @property
    def capturable(self) -> bool:
        """See `Decoder`. The host reads which experts a step takes."""
        return isinstance(self.config.mlp, int) and kernels_take(self.config.head_dim)

    def forward(self, tokens: Tensor, context: ForwardContext) -> Tensor:
        """tokens: int64 [T], those of all rows of the step in a row; T may be 0. Leaves states, convolution columns
        and last hidden vectors in the slots of the step's rows. Returns the logits of the rows that sample, float32
        [S, vocab_size]. To be called under torch.inference_mode."""
        states = _recurrent(context)
        if len(tokens):
            x = self.body(tokens, context)
            states.hidden[states.slots] = self._norm(x[states.last])
        return self.logits(states.hidden[states.sampled])

    def verify(self, tokens: Tensor, context: ForwardContext) -> Tensor:
        """The vectors behind the step's tokens, normed, [T, hidden], of a context with `replay`: K and V are written,
        but no state, column or hidden vector of the pool is. `fold` moves states and columns on."""
        return self._norm(self.body(tokens, context))

    def fold(
        self, columns: Tensor, states: Tensor, slots: Tensor, places: Tensor, accepted: Tensor, records: Records
    ) -> None:
        """See `kernels.gated_delta.fold`."""
        gated_delta.fold(self._net(), columns, states, slots, places, accepted, records)

    def records(self, rows: int) -> Records:
        """For the verification of so many tokens in all."""
        inner = inner_dtype(self.dtype)
        return empty_records(self.config.delta_net_layers, rows, self._net(), inner, self.dtype, self.device)

    def _net(self) -> NetWeights:
        """Of any layer, for the shapes."""
        return next(block.net for block in self._blocks if block.net is not None)

    def prepare(self) -> None:
        """Have kernels that tune themselves do so before the first request; on a GPU it may take a minute."""
        net = self.config.delta_net
        inner = inner_dtype(self.dtype)
        gated_delta.prepare(
            net.key_heads,
            net.value_heads,
            net.key_dim,
            net.value_dim,
            net.conv_width,
            inner,
            self.dtype,
            self.device,
        )

    def body(self, tokens: Tensor, context: ForwardContext) -> Tensor:
        """All tokens' vectors behind the last block, float32 [T, hidden], before the final norm."""
        cos, sin = self.angles(context.positions)
        x = self._embedding.take(tokens, torch.float32)
        for block in self._blocks:
            x = block(x, cos, sin, context)
        return x

    def normed(self, x: Tensor) -> Tensor:
        """The final norm: what the head and the draft head read."""
        return self._norm(x)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._embedding.take(tokens, self.dtype)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return norm_rope.rotary_angles(positions, self._frequencies)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden], normed -> float32 [N, vocab_size]."""
        return self._head(hidden).float()


def _recurrent(context: ForwardContext) -> RecurrentContext:
    if context.recurrent is None:
        raise ValueError("a model with recurrent states was called without any")
    return context.recurrent


def _blocks(config: HybridConfig, empty: Empty) -> list[HybridBlock]:
    blocks: list[HybridBlock] = []
    attention = delta_net = 0
    for layer, kind in enumerate(config.layer_types):
        if kind == "full_attention":
            mixer: GatedAttention | GatedDeltaNet = GatedAttention(config, attention, empty)
            attention += 1
        else:
            mixer = GatedDeltaNet(config, delta_net, empty)
            delta_net += 1
        blocks.append(HybridBlock(config, f"model.layers.{layer}", mixer, empty))
    return blocks
