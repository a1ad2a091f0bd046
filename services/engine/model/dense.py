"""The dense decoder: Llama, Qwen2, Qwen3."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernels import norm_rope
from kernels.kv_codec import kernels_take
from services.engine.model.config import ModelConfig
from services.engine.model.layers import Block, ForwardContext, RmsNorm, inverse_frequencies
from services.engine.model.matrix import Matrix, Place


class DenseDecoder:
    """Weights on one device. Its memory is not initialised: every slot must be filled before the first forward."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        empty = partial(torch.empty, dtype=dtype, device=device)
        self.config = config
        self.dtype = dtype
        self.device = device
        self._embedding = Matrix(config.vocab_size, config.hidden_size, empty, whole=True)
        self._blocks = [Block(config, layer, empty) for layer in range(config.layers)]
        self._norm = RmsNorm(config.hidden_size, config.rms_norm_eps, empty)
        self._head = self._embedding if config.tied_head else Matrix(config.vocab_size, config.hidden_size, empty)
        self._frequencies = inverse_frequencies(config, device)

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
        """See `Decoder`."""
        return kernels_take(self.config.head_dim)

    def forward(self, tokens: Tensor, context: ForwardContext) -> Tensor:
        """tokens: int64 [T], those of all rows of the step in a row. Returns the logits of `context.outputs`,
        float32 [S, vocab_size]. To be called under torch.inference_mode."""
        cos, sin = norm_rope.rotary_angles(context.positions, self._frequencies)
        x = self._embedding.take(tokens, self.dtype)
        for block in self._blocks:
            x = block(x, cos, sin, context)
        return self._head(self._norm(x[context.outputs])).float()
