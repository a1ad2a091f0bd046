"""How much the hybrid decoder rounds in bfloat16, on a small model that is as sensitive as the family's large ones."""

from typing import Any

import pytest
import torch
from torch.nn.functional import kl_div
from transformers import PreTrainedModel

from kernels.gated_delta import flash
from tests.devices import DEVICES
from tests.engine.hybrid_models import hybrid_oracle
from tests.engine.tiny_models import Bench, decoder, oracle_logits, random_ids, row

SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
FEEDS: dict[str, dict[str, Any]] = {
    "dense": {"intermediate_size": 384},
    "moe": {
        "num_experts": 32,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}
IDS = random_ids(200, seed=1)
ENDS = (*range(20, 100, 20), *range(100, 201))
"""Of the steps: some of a chunk, then decodes."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", FEEDS)
def test_loses_much_less_than_transformers(shape: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both against the same weights, rounded, computed in float32. The median, because where a rounding makes the
    router choose another expert, a position may lose a hundred times as much. With the residual and all between the
    matrices of a gated delta net in bfloat16 we lost 0.83 (dense) and 0.67 (moe) of theirs, without 0.48 and 0.33."""
    monkeypatch.setattr(flash, "usable", lambda q: False)
    model = _oracle(shape)
    places = [end - 1 for end in ENDS]
    exact = oracle_logits(model, IDS)[places]
    bench = Bench(decoder(model, device, torch.bfloat16))
    steps = zip((0, *ENDS[:-1]), ENDS, strict=True)
    ours = torch.stack([bench.run(row(IDS, start, end, [3, 1, 2, 0], state=0))[0] for start, end in steps])
    theirs = oracle_logits(model.bfloat16(), IDS)[places].float()
    assert 0 < _median_kl(ours, exact) <= 0.6 * _median_kl(theirs, exact)


def _oracle(shape: str) -> PreTrainedModel:
    """Of the large models' initial gains: a matrix's is about 0.9, the first layers' outputs are many times as large
    as the embeddings, the norms' factors are 1; but the router is as decided as a trained one's."""
    model = hybrid_oracle(shape, **SMALL, **FEEDS[shape])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.fill_(1.0 if "linear_attn.norm" in name else 0.0)
            elif name.endswith("embed_tokens.weight"):
                weight.mul_(0.13)
            elif not name.endswith("A_log"):
                weight.mul_(4.3 if name.endswith("mlp.gate.weight") else 0.53)
            weight.copy_(weight.to(torch.bfloat16))
    return model


def _median_kl(logits: torch.Tensor, exact: torch.Tensor) -> float:
    divergence = kl_div(logits.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    print(f"KL: mean {divergence.mean():.2e}, median {divergence.median():.2e}")
    return float(divergence.median())
