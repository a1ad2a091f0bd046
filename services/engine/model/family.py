"""The families of models: which decoder runs which config."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from services.engine.model import config as dense
from services.engine.model import hybrid_config as hybrid
from services.engine.model.config import ModelConfig, ModelError, required
from services.engine.model.dense import DenseDecoder
from services.engine.model.hybrid_config import HybridConfig
from services.engine.model.layers import ForwardContext
from services.engine.model.matrix import Place
from services.engine.model.qwen3_5 import HybridDecoder

DecoderConfig = ModelConfig | HybridConfig


class Decoder(Protocol):
    """A model's weights on one device, and its forward pass."""

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def capturable(self) -> bool:
        """Whether a graph can capture `forward` on a GPU: nothing that it launches depends on what the host reads."""
        ...

    def slots(self) -> Iterator[Place]: ...

    def forward(self, tokens: Tensor, context: ForwardContext) -> Tensor: ...


def parse_model_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """A `config.json` of `transformers`. Raises ModelError naming the key that we cannot honour."""
    architecture = required(raw, "model_type", str)
    if architecture in hybrid.ARCHITECTURES:
        return hybrid.parse_hybrid_config(raw)
    if architecture in dense.ARCHITECTURES:
        return dense.parse_config(raw)
    known = ", ".join((*dense.ARCHITECTURES, *hybrid.ARCHITECTURES))
    raise ModelError(f"model_type {architecture!r} is not supported; known: {known}")


def build_decoder(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> DenseDecoder | HybridDecoder:
    """With memory that is not initialised yet."""
    if isinstance(config, HybridConfig):
        return HybridDecoder(config, dtype, device)
    return DenseDecoder(config, dtype, device)
