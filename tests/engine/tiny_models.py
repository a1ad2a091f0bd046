"""Small random models of `transformers` as oracles, the same weights in our decoder, and a runner around it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from services.engine.batch import Copy, ModelOutput, Row, SampleSpec, ScheduledBatch, Transfer
from services.engine.cache.pages import KvLayout, KvPages
from services.engine.cache.states import StateLayout, StatePool
from services.engine.cache.transfer import page_transfers
from services.engine.config import StateDtype
from services.engine.model.dense import DenseDecoder
from services.engine.model.family import Decoder, build_decoder, parse_model_config
from services.engine.model.hybrid_config import HybridConfig
from services.engine.model.layers import ForwardContext
from services.engine.model.qwen3_5 import HybridDecoder
from services.engine.runner import ModelRunner
from services.protocol.generate import SamplingParams

CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
GREEDY = SamplingParams(max_tokens=1, temperature=0)


def oracle(architecture: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random float32 model with no weight left at an initial value that would hide a mistake (0 biases, 1 norms)."""
    values: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        **changes,
    }
    config_class, model_class = CLASSES[architecture]
    torch.manual_seed(seed)
    model = model_class(config_class(**values)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.15 + (1.0 if "norm" in name else 0.0))
    return model


def decoder(
    model: PreTrainedModel, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> DenseDecoder | HybridDecoder:
    """The oracle's weights in our decoder."""
    ours = build_decoder(parse_model_config(model.config.to_dict()), dtype, device or torch.device("cpu"))
    weights = model.state_dict()
    for slot in ours.slots():
        assert slot.target.shape == weights[slot.name].shape, slot.name
        slot.target.copy_(weights[slot.name])
    return ours


@torch.no_grad()
def oracle_logits(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """float32 [len(ids), vocab]."""
    return model(torch.tensor([list(ids)])).logits[0]


class Recorder:
    """A decoder that keeps the logits of its last forward."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self.config = model.config
        self.logits = torch.empty(0)

    def forward(self, tokens: Tensor, context: ForwardContext) -> Tensor:
        logits = self._model.forward(tokens, context)
        self.logits = logits.clone().cpu()
        return logits


class Bench:
    """A ModelRunner over a decoder; `run` returns the logits of the rows that sample."""

    def __init__(
        self,
        model: DenseDecoder | HybridDecoder,
        pages: int = 32,
        states: int = 16,
        state_dtype: StateDtype = "float32",
    ) -> None:
        self.model = Recorder(model)
        self.pages = KvPages(KvLayout.of(model.config, model.dtype), pages, model.device)
        self.states = None
        if isinstance(model.config, HybridConfig):
            layout = StateLayout.of(model.config, model.dtype, state_dtype)
            self.states = StatePool(layout, states, model.device)
        self.transfers = page_transfers(self.pages, self.states)
        self.runner = ModelRunner(self.model, self.pages, self.transfers, model.device, self.states)
        self.output = ModelOutput(0, {})

    def run(
        self,
        *rows: Row,
        transfers: tuple[Transfer, ...] = (),
        before: tuple[Copy, ...] = (),
        after: tuple[Copy, ...] = (),
    ) -> Tensor:
        self.output = self.runner.run(ScheduledBatch(self.output.step + 1, rows, transfers, before, after))
        return self.model.logits


def row(
    ids: Sequence[int],
    start: int,
    end: int,
    pages: Sequence[int],
    name: str = "r",
    write_from: int | None = None,
    samples: bool = True,
    params: SamplingParams = GREEDY,
    state: int = -1,
) -> Row:
    """Tokens [start, end) of the sequence `ids`."""
    used = -(-end // 64)
    spec = SampleSpec(params, ids[:end], []) if samples else None
    written = start if write_from is None else write_from
    return Row(name, list(ids[start:end]), start, list(pages[:used]), written, spec, state)


def random_ids(count: int, seed: int, vocab: int = 97) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder
