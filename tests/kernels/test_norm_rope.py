import math

import pytest
import torch

from kernels.norm_rope import rms_norm, rotary_angles, rotate
from tests.devices import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.bfloat16, 0.05)])
def test_rms_norm(device: torch.device, dtype: torch.dtype, atol: float) -> None:
    x = (torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    weight = torch.linspace(0.5, 2, 16).to(dtype)
    got = rms_norm(x.to(device), weight.to(device), 1e-5)
    assert got.dtype == dtype
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(got.double().cpu(), expected, atol=atol, rtol=0)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).abs().max() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_rotation(device: torch.device) -> None:
    """Pair (i, i + D/2) turns by position * frequency[i]: as complex numbers, one factor."""
    frequencies = torch.tensor([1.0, 0.25, 0.01])
    positions = torch.tensor([0, 1, 7, 4000])
    x = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(1))
    cos, sin = rotary_angles(positions.to(device), frequencies.to(device))
    got = rotate(x.to(device), cos, sin).cpu()
    for token, position in enumerate(positions.tolist()):
        for head in range(2):
            for pair in range(3):
                angle = position * float(frequencies[pair])
                z = complex(x[token, head, pair], x[token, head, pair + 3]) * complex(math.cos(angle), math.sin(angle))
                assert complex(got[token, head, pair], got[token, head, pair + 3]) == pytest.approx(z, abs=1e-5)


def test_position_zero_and_dtype() -> None:
    x = torch.randn(1, 3, 8).to(torch.bfloat16)
    cos, sin = rotary_angles(torch.tensor([0]), torch.ones(4))
    assert torch.equal(rotate(x, cos, sin), x)
    assert cos.dtype == torch.float32
