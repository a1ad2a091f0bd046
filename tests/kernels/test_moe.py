import pytest
import torch
from torch.nn.functional import silu

from kernels.moe import experts, route
from tests.devices import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 3, 50])
def test_each_token_by_itself(device: torch.device, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 12, generator=generator)
    logits = torch.randn(tokens, 7, generator=generator) * 2
    gate_up, down = torch.randn(7, 10, 12, generator=generator), torch.randn(7, 12, 5, generator=generator)
    chosen, shares = route(logits.to(device), 3)
    got = experts(x.to(device), chosen, shares, gate_up.to(device), down.to(device))
    for token in range(tokens):
        probabilities = logits[token].softmax(-1)
        best = sorted(range(7), key=lambda e: -probabilities[e])[:3]
        total = sum(probabilities[e] for e in best)
        expected = torch.zeros(12)
        for e in best:
            gate, up = gate_up[e, :5] @ x[token], gate_up[e, 5:] @ x[token]
            expected += probabilities[e] / total * (down[e] @ (silu(gate) * up))
        assert sorted(chosen[token].tolist()) == sorted(best)
        torch.testing.assert_close(got[token].cpu(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(shares.sum(-1).cpu(), torch.ones(tokens))


def test_shares_are_taken_in_float32() -> None:
    chosen, shares = route(torch.tensor([[8.0, 8.0, 0.0, 7.9]], dtype=torch.bfloat16), 2)
    assert shares.dtype == torch.float32
    assert sorted(chosen[0].tolist()) == [0, 1]


@pytest.mark.parametrize("device", DEVICES)
def test_the_sum_is_not_rounded(device: torch.device) -> None:
    """bfloat16 weights and inputs, of which only the SwiGLU is rounded between the two products."""
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(6, 16, generator=generator).to(device, torch.bfloat16)
    gate_up = torch.randn(4, 10, 16, generator=generator).to(device, torch.bfloat16)
    down = torch.randn(4, 16, 5, generator=generator).to(device, torch.bfloat16)
    chosen, shares = route(torch.randn(6, 4, generator=generator).to(device), 2)
    got = experts(x, chosen, shares, gate_up, down)
    expected = torch.zeros(6, 16, device=device)
    for token, rank in [(token, rank) for token in range(6) for rank in range(2)]:
        expert = int(chosen[token, rank])
        gate, up = (x[token : token + 1] @ gate_up[expert].t()).chunk(2, dim=-1)
        expected[token] += shares[token, rank] * ((silu(gate) * up).float() @ down[expert].float().t())[0]
    assert got.dtype == torch.float32
    # A sum rounded to bfloat16 would be off by up to 0.4 %.
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
