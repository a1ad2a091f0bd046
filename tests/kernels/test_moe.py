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
