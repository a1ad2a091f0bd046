"""Two layers of the 27B's and of the 35B-A3B's shape against transformers, on a GPU; only the vocabulary is cut."""

from typing import Any

import pytest
import torch
from torch.nn.functional import kl_div
from transformers import PreTrainedModel

from kernels.gated_delta import flash
from tests.engine.hybrid_models import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)
from tests.engine.tiny_models import Bench, decoder, oracle_logits, random_ids, row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GPU = torch.device("cuda")
FREE_BYTES = 20 * 2**30
VOCABULARY = 4096
SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
DENSE_27B: dict[str, Any] = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "linear_num_value_heads": 48,
}
MOE_35B: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
IDS = random_ids(700, seed=1, vocab=VOCABULARY)
OTHER = random_ids(90, seed=2, vocab=VOCABULARY)
ENDS = (1, 300, 511, 512, 513, 600, 700)
TAIL = range(600, 700)
"""Positions, each of a decode. Single ones lose from 1e-5 to 1e-2, so that a mean of ENDS alone is much by chance."""


@pytest.fixture(params=["27B", "35B-A3B"])
def oracle(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Initialised as transformers does, float32, but for the router, which is as decided as a trained one's: among
    near equals any rounding chooses other experts."""
    free = torch.cuda.mem_get_info()[0]
    if free < FREE_BYTES:
        pytest.skip(f"{free} bytes free on the device, {FREE_BYTES} needed")
    torch.manual_seed(0)
    with GPU:
        if request.param == "27B":
            return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHARED, **DENSE_27B)).eval()
        config = Qwen3_5MoeTextConfig(**SHARED, **MOE_35B, experts_implementation="eager")
        model = Qwen3_5MoeForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight.mul_(8)
    return model


def expected(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with GPU:
        return oracle_logits(model, ids)


def run(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits at ENDS of IDS, cut there, and of OTHER in the last of these steps."""
    pages = [3, 1, 4, 15, 9, 2, 6, 5, 8, 7, 12]
    got = []
    start = 0
    for end in ENDS[:-1]:
        got.append(bench.run(row(IDS, start, end, pages, state=3))[0])
        start = end
    bench.run(row(OTHER, 0, 89, [20, 21], "other", samples=False, state=0))
    last = bench.run(row(OTHER, 89, 90, [20, 21], "other", state=0), row(IDS, start, ENDS[-1], pages, state=3))
    return torch.stack([*got, last[1]]), last[0]


def test_float32(oracle: PreTrainedModel) -> None:
    got, other = run(Bench(decoder(oracle, GPU), states=4))
    places = [end - 1 for end in ENDS]
    torch.testing.assert_close(got, expected(oracle, IDS)[places].cpu(), atol=1e-3, rtol=0)
    torch.testing.assert_close(other, expected(oracle, OTHER)[-1].cpu(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("kernel", ["flash-linear-attention", "reference"])
def test_bfloat16(oracle: PreTrainedModel, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same weights, rounded, computed in float32."""
    if kernel == "reference":
        monkeypatch.setattr(flash, "usable", lambda q: False)
    else:
        pytest.importorskip("fla")
    with torch.no_grad():
        for weight in oracle.parameters():
            weight.copy_(weight.to(torch.bfloat16))
    exact, exact_tail = at_ends(oracle), at_tail(oracle)
    bench = Bench(decoder(oracle, GPU, torch.bfloat16), states=4)
    got, other = run(bench)
    divergence = mean_kl(torch.cat((got, other[None])), exact)
    tail = mean_kl(decoded_tail(bench), exact_tail)
    oracle.bfloat16()
    theirs, their_tail = mean_kl(at_ends(oracle), exact), mean_kl(at_tail(oracle), exact_tail)
    print(
        f"mean KL {divergence:.2e}, of transformers in bfloat16 {theirs:.2e}; at the tail {tail:.2e}, {their_tail:.2e}"
    )
    assert 0 <= divergence <= 1e-3
    assert 0 <= tail <= 1e-3


def at_ends(model: PreTrainedModel) -> torch.Tensor:
    """What `run` computes: float32 [len(ENDS) + 1, vocabulary]."""
    places = [end - 1 for end in ENDS]
    return torch.cat((expected(model, IDS)[places], expected(model, OTHER)[-1:])).float().cpu()


def decoded_tail(bench: Bench) -> torch.Tensor:
    """The logits at TAIL of IDS, token by token: [len(TAIL), vocabulary]."""
    pages = [24, 10, 11, 13, 14, 16, 17, 18, 19, 22, 23]
    bench.run(row(IDS, 0, TAIL.start, pages, "tail", samples=False, state=1))
    steps = [bench.run(row(IDS, place, place + 1, pages, "tail", state=1))[0] for place in TAIL]
    return torch.stack(steps)


def at_tail(model: PreTrainedModel) -> torch.Tensor:
    """What `decoded_tail` computes: float32."""
    return expected(model, IDS)[TAIL.start : TAIL.stop].float().cpu()


def mean_kl(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float(kl_div(logits.log_softmax(-1), exact.log_softmax(-1), log_target=True, reduction="batchmean"))
