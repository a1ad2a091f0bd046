"""The model in training: body, MTP layer and losses over rows of one length.

The same arithmetic and parameter names as transformers' Qwen3_5ForCausalLM, plus `mtp.*`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train.checkpoint import Parameters
from tools.train.delta_rule import delta_rule
from tools.train.layers import PLAIN, Pieces, Places, Weights, causal_attention, linear, rms_norm
from tools.train.shape import ModelShape

MTP_LOSS_WEIGHT = 0.15
"""Of each draft step, beside the main loss's 1."""


@dataclass(frozen=True, slots=True)
class Losses:
    """Weighted sums over a micro-batch; divide by `weight` for means."""

    total: Tensor
    """What is minimised: main + MTP_LOSS_WEIGHT * each draft."""
    main: Tensor
    drafts: tuple[Tensor, ...]
    weight: Tensor


class TrainModel:
    """Parameters (float32 leaves on `device`) and the forward pass: bf16 activations on CUDA, float32 on the CPU."""

    def __init__(self, shape: ModelShape, parameters: Parameters, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.parameters: Parameters = {
            # a copy, so that training never writes into the caller's tensors
            name: value.to(device, torch.float32, copy=True).requires_grad_()
            for name, value in parameters.items()
        }
        dims = torch.arange(0, shape.rotary_dims, 2, dtype=torch.float32, device=device)
        self._frequencies = 1.0 / shape.rope_theta ** (dims / shape.rotary_dims)
        self._layers = [self._layer(f"model.layers.{i}.") for i in range(shape.layers)]
        self._mtp_layer = self._layer("mtp.layers.0.")

    def _layer(self, prefix: str) -> Weights:
        return {name.removeprefix(prefix): value for name, value in self.parameters.items() if name.startswith(prefix)}

    @property
    def head(self) -> Tensor:
        """[vocab, hidden], also the embedding."""
        return self.parameters["model.embed_tokens.weight"]

    def places(self, tokens: int, row_length: int, first: int = 0) -> Places:
        """Of rows that start at position `first`."""
        positions = torch.arange(tokens, device=self.device) % row_length + first
        angles = positions.float()[:, None] * self._frequencies
        return Places(positions, angles.cos(), angles.sin())

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.head).to(self.dtype)

    def body(self, ids: Tensor, pieces: Pieces = PLAIN) -> Tensor:
        """ids int64 [rows, T] -> residual stream before the final norm [rows * T, hidden]. T % 64 == 0 on CUDA."""
        places = self.places(ids.numel(), ids.shape[1])
        x = self.embed(ids.reshape(-1))
        for index, layer in enumerate(self._layers):
            if self.shape.is_full_attention(index):
                x = self._attention_layer(x, places, ids.shape[1], layer, pieces)
            else:
                x = self._delta_layer(x, places, ids.shape[1], layer, pieces)
        return x

    def normed(self, x: Tensor) -> Tensor:
        """After the main model's final norm: what the head and the MTP layer read."""
        return rms_norm(x, self.parameters["model.norm.weight"])

    def draft_normed(self, x: Tensor) -> Tensor:
        """After the MTP layer's own norm: what the head and the next draft step read."""
        return rms_norm(x, self.parameters["mtp.norm.weight"])

    def logits(self, normed: Tensor) -> Tensor:
        """[..., hidden] -> float32 [..., vocab]"""
        return linear(normed, self.head).float()

    def mtp_input(self, hidden: Tensor, following: Tensor, pieces: Pieces = PLAIN) -> Tensor:
        """hidden [N, hidden] normed, of the main model or of the draft step before; following int64 [N]."""
        return pieces.mtp_input(
            hidden,
            self.embed(following),
            self.parameters["mtp.pre_fc_norm_hidden.weight"],
            self.parameters["mtp.pre_fc_norm_embedding.weight"],
            self.parameters["mtp.fc.weight"],
        )

    def mtp(self, hidden: Tensor, following: Tensor, pieces: Pieces = PLAIN) -> Tensor:
        """One draft step at every position: hidden [rows * T, hidden], following int64 [rows, T], the token after each
        hidden's own -> [rows * T, hidden] before `draft_normed`."""
        places = self.places(following.numel(), following.shape[1])
        x = self.mtp_input(hidden, following.reshape(-1), pieces)
        return self._attention_layer(x, places, following.shape[1], self._mtp_layer, pieces)

    def losses(self, ids: Tensor, weights: Tensor, draft_steps: int, pieces: Pieces = PLAIN) -> Losses:
        """ids int64 [rows, T]; weights float32 [rows, T]: weights[i] weighs the prediction of ids[i] from those before.
        Draft step s at position t is told the tokens to t + s and predicts t + s + 1."""

        def ahead(t: Tensor, steps: int) -> Tensor:
            return F.pad(t[:, steps:], (0, steps))

        def loss_at(x: Tensor, norm: str, steps: int) -> tuple[Tensor, Tensor]:
            targets, target_weights = ahead(ids, steps).reshape(-1), ahead(weights, steps).reshape(-1)
            return pieces.head_loss(x, self.parameters[norm], self.head, targets, target_weights)

        main, hidden = loss_at(self.body(ids, pieces), "model.norm.weight", 1)
        drafts: list[Tensor] = []
        total = main
        for step in range(1, draft_steps + 1):
            x = self.mtp(hidden, ahead(ids, step), pieces)
            draft, hidden = loss_at(x, "mtp.norm.weight", step + 1)
            total = total + MTP_LOSS_WEIGHT * draft
            drafts.append(draft)
        return Losses(total, main, tuple(drafts), weights.sum())

    def _delta_layer(self, x: Tensor, places: Places, row_length: int, layer: Weights, pieces: Pieces) -> Tensor:
        q, k, v, z, g, beta = pieces.delta_inputs(
            x, places.positions, layer, self.shape.key_width, self.shape.delta_head_dim
        )
        return pieces.delta_output(x, delta_rule(q, k, v, g, beta, row_length), z, layer)

    def _attention_layer(self, x: Tensor, places: Places, row_length: int, layer: Weights, pieces: Pieces) -> Tensor:
        q, k, v, gate = pieces.attention_inputs(
            x, places.cos, places.sin, layer, self.shape.kv_heads, self.shape.head_dim
        )
        return pieces.attention_output(x, causal_attention(q, k, v, row_length), gate, layer)

    def mtp_attention_inputs(self, x: Tensor, places: Places) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The MTP layer up to its attention, for those who keep its keys and values; see `attention_inputs`."""
        return PLAIN.attention_inputs(
            x, places.cos, places.sin, self._mtp_layer, self.shape.kv_heads, self.shape.head_dim
        )

    def mtp_attention_output(self, x: Tensor, o: Tensor, gate: Tensor) -> Tensor:
        return PLAIN.attention_output(x, o, gate, self._mtp_layer)
