"""What a step is planned to take, against what it takes."""

from typing import Any

import pytest
import torch

from bench.random_checkpoint import TEXT
from services.engine.batch import Row
from services.engine.config import StateDtype
from services.engine.model.family import build_decoder, parse_model_config
from services.engine.workspace import Step, workspace
from services.protocol.generate import SamplingParams
from tests.engine.live_memory import LiveMemory
from tests.engine.tiny_models import Bench, random_ids, row

VOCABULARY = 1000
DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 320,
    "intermediate_size": 1088,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
HYBRID: dict[str, Any] = {
    **TEXT,
    **{name: value for name, value in DENSE.items() if name not in ("model_type", "rope_theta")},
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "shared_expert_intermediate_size": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "dense, attention": {**DENSE, "num_attention_heads": 32, "intermediate_size": 64},
    "gated delta rule": HYBRID,
    "mlp": {**HYBRID, "intermediate_size": 2000},
    "attention": {**HYBRID, "num_attention_heads": 48},
    "experts": {**HYBRID, **EXPERTS, "moe_intermediate_size": 2000},
    "shared expert": {**HYBRID, **EXPERTS, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 2000},
}
SAMPLED = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, seed=1)


def bench(raw: dict[str, Any], states: int = 2, pages: int = 20, state_dtype: StateDtype = "float32") -> Bench:
    model = build_decoder(parse_model_config(raw), torch.float32, torch.device("cpu"))
    for slot in model.slots():
        slot.target.zero_()
    return Bench(model, pages=pages, states=states, state_dtype=state_dtype)


def peak(rig: Bench, *rows: Row) -> int:
    rig.run(*rows[:1])  # once before: what is made only once is no work of a step
    with LiveMemory() as memory:
        rig.run(*rows)
    assert rig.output.sampled
    return memory.peak


@pytest.mark.parametrize("name", MODELS)
def test_prefill(name: str) -> None:
    """Each model has another stage as its largest. What kernels hold inside of one operation is not measured."""
    rig, tokens = bench(MODELS[name]), 600
    state = 0 if rig.states is not None else -1
    taken = peak(rig, row(random_ids(tokens, seed=0, vocab=VOCABULARY), 0, tokens, range(20), state=state))
    planned = workspace(rig.model.config, 4, 4, "cpu", "plain", 0).bytes(Step(tokens, 1, 1, tokens))
    assert 0.8 * planned <= taken <= planned


@pytest.mark.parametrize(
    ("name", "state_dtype"), [("dense", "float32"), ("gated delta rule", "float32"), ("gated delta rule", "float16")]
)
def test_decode_and_draw(name: str, state_dtype: StateDtype) -> None:
    """Many rows with a large vocabulary, and states that are larger than all else."""
    large = {"vocab_size": 30_000} if name == "dense" else {"linear_key_head_dim": 256, "linear_value_head_dim": 256}
    count = 24
    rig = bench({**MODELS[name], **large}, states=count, pages=count, state_dtype=state_dtype)
    ids = random_ids(3, seed=0, vocab=VOCABULARY)
    hybrid = rig.states is not None
    for at in range(count):
        rig.run(row(ids, 0, 2, [at], str(at), state=at if hybrid else -1))
    rows = [row(ids, 2, 3, [at], str(at), params=SAMPLED, state=at if hybrid else -1) for at in range(count)]
    planned = workspace(rig.model.config, 4, 4, "cpu", "plain", 0).bytes(Step(count, count, count, count * 64))
    assert 0.75 * planned <= peak(rig, *rows) <= planned
