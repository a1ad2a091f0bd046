"""A model of which only shapes and formats are known: enough to plan for it without a file."""

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from bench.random_checkpoint import TEXT
from services.engine.model.family import DecoderConfig, build_decoder, parse_model_config
from services.engine.model.mtp import MtpHead
from services.engine.model.qwen3_5 import HybridDecoder
from services.engine.weights.checkpoint import WeightFile
from services.protocol.events import TokenizerBundle

META = torch.device("meta")


class ShapeSource:
    """A `QuantizedSource` in bfloat16; its values cannot be read."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self._config = parse_model_config(raw)
        model = build_decoder(self._config, torch.bfloat16, META)
        places = list(model.slots())
        if isinstance(model, HybridDecoder) and model.config.mtp:
            places += MtpHead(model).slots()
        self._names = {place.name for place in places}

    @property
    def path(self) -> Path:
        return Path("shapes")

    @property
    def config(self) -> DecoderConfig:
        return self._config

    def names(self) -> Set[str]:
        return self._names

    def place(self, name: str) -> str:
        return f"tensor {name}"

    def format(self, name: str) -> str:
        return "bf16"

    def shape(self, name: str) -> NoReturn:
        raise AssertionError(name)

    def read(self, name: str, target: Tensor) -> NoReturn:
        raise AssertionError(name)

    def encoded(self, name: str, first: int, last: int) -> NoReturn:
        raise AssertionError(name)

    def files(self) -> Sequence[WeightFile]:
        return []

    def bundle(self) -> TokenizerBundle:
        raise AssertionError


def model_27b(mtp: bool = True) -> ShapeSource:
    """The shape of Qwen3.6-27B."""
    return ShapeSource({**TEXT, "num_hidden_layers": 64, "mtp_num_hidden_layers": int(mtp)})
