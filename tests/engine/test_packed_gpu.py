"""Packed weights through our kernels on a GPU: the trained model says what it says with the same weights decoded."""

from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div

from kernels.linear.quantized import FORMATS
from services.engine.config import EngineConfig
from services.engine.weights.loader import LoadedModel, load_checkpoint
from services.engine.weights.safetensors_checkpoint import SafetensorsCheckpoint
from services.engine.weights.source import GROUPED
from tests.engine.packed_source import EncodedSource
from tests.engine.test_packed_model import everywhere, greedy
from tests.engine.tiny_prompts import MODEL, prompts, tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def load(format: str, weights: Literal["dense", "packed"], dtype: Literal["float32", "bfloat16"]) -> LoadedModel:
    source = EncodedSource(SafetensorsCheckpoint(MODEL), everywhere(format))
    config = EngineConfig(device="cuda", dtype=dtype, weights=weights)
    return load_checkpoint(source, "model", config, lambda share, what: None)


def divergence(logits: Tensor, exact: Tensor) -> float:
    logs = logits.float().log_softmax(-1)
    return float(kl_div(logs, exact.float().log_softmax(-1), log_target=True, reduction="batchmean"))


@pytest.mark.parametrize("format", [*FORMATS, GROUPED])
def test_trained_model(format: str) -> None:
    """In bfloat16 against float32: the packed model is as near as the decoded one, and nearly always says the same."""
    rows = [tokenizer().encode(text).ids for text in (*prompts("tools", 4), *prompts("chat", 4))]
    expected, exact = greedy(load(format, "dense", "float32"), rows, 24)
    _, plain = greedy(load(format, "dense", "bfloat16"), rows, 1)
    got, packed = greedy(load(format, "packed", "bfloat16"), rows, 24)
    assert divergence(packed, exact) < 2 * divergence(plain, exact) + 1e-3
    assert sum(a == b for a, b in zip(got, expected, strict=True)) >= len(rows) - 2


def test_float32() -> None:
    """Not the kernels' type: weights are decoded for each product, and nothing is lost."""
    rows = [tokenizer().encode(text).ids for text in prompts("tools", 2)]
    expected, exact = greedy(load("int4-g64", "dense", "float32"), rows, 12)
    got, logits = greedy(load("int4-g64", "packed", "float32"), rows, 12)
    torch.testing.assert_close(logits, exact, atol=2e-3, rtol=0)
    assert got == expected
