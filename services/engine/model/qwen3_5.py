"""The hybrid decoder of the Qwen3.5 family, dense and mixture-of-experts."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding

from kernels import gated_delta, norm_rope
from kernels.linear import linear
from services.engine.model.attention import GatedAttention, partial_frequencies
from services.engine.model.gated_delta_net import GatedDeltaNet
from services.engine.model.hybrid_config import HybridConfig
from services.engine.model.layers import CentredRmsNorm, Empty, ForwardContext, Mlp, RecurrentContext, Slot
from services.engine.model.moe import SparseMlp


class HybridBlock:
    """One layer: x + mixer(norm(x)), then x + mlp(norm(x)); the mixer is attention or a gated delta net."""

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
        normed = self._mixer_norm(x)
        if isinstance(self._mixer, GatedAttention):
            x = x + self._mixer(normed, cos, sin, context)
        else:
            x = x + self._mixer(normed, _recurrent(context))
        return x + self._mlp(self._mlp_norm(x))

    def slots(self) -> list[Slot]:
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
        self._embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self._blocks = _blocks(config, empty)
        self._norm = CentredRmsNorm(config.hidden_size, config.rms_norm_eps, empty)
        self._head = self._embedding if config.tied_head else torch.empty_like(self._embedding)
        self._frequencies = partial_frequencies(config, device)

    def slots(self) -> Iterator[Slot]:
        """Everything that a checkpoint must bring."""
        yield Slot("model.embed_tokens.weight", self._embedding)
        for block in self._blocks:
            yield from block.slots()
        yield from self._norm.slots("model.norm")
        if not self.config.tied_head:
            yield Slot("lm_head.weight", self._head)

    def forward(self, tokens: Tensor, context: ForwardContext) -> Tensor:
        """tokens: int64 [T], those of all rows of the step in a row; T may be 0. Leaves states, convolution columns
        and last hidden vectors in the slots of the step's rows. Returns the logits of the rows that sample, float32
        [S, vocab_size]. To be called under torch.inference_mode."""
        states = _recurrent(context)
        if len(tokens):
            x = self.body(tokens, context)
            states.hidden[states.slots] = self._norm(x[states.last])
        return self.logits(states.hidden[states.sampled])

    def prepare(self) -> None:
        """Have kernels that tune themselves do so before the first request; on a GPU it may take a minute."""
        net = self.config.delta_net
        gated_delta.prepare(net.key_heads, net.value_heads, net.key_dim, net.value_dim, self.dtype, self.device)

    def body(self, tokens: Tensor, context: ForwardContext) -> Tensor:
        """All tokens' vectors behind the last block, [T, hidden], before the final norm."""
        cos, sin = self.angles(context.positions)
        x = self.embed(tokens)
        for block in self._blocks:
            x = block(x, cos, sin, context)
        return x

    def normed(self, x: Tensor) -> Tensor:
        """The final norm: what the head and the draft head read."""
        return self._norm(x)

    def embed(self, tokens: Tensor) -> Tensor:
        return embedding(tokens, self._embedding)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return norm_rope.rotary_angles(positions, self._frequencies)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden], normed -> float32 [N, vocab_size]."""
        return linear(hidden, self._head).float()


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
