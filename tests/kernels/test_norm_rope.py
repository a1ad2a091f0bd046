import math

import pytest
import torch

from kernels.norm_rope import rms_norm, rms_norm_centred, rms_norm_gated, rotary_angles, rotate
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


@pytest.mark.parametrize("device", DEVICES)
def test_a_part_of_the_dims_rotates(device: torch.device) -> None:
    x = torch.randn(3, 2, 10, generator=torch.Generator().manual_seed(4)).to(device)
    cos, sin = rotary_angles(torch.tensor([0, 3, 50]).to(device), torch.tensor([1.0, 0.1]).to(device))
    got = rotate(x, cos, sin)
    assert torch.equal(got[..., 4:], x[..., 4:])
    torch.testing.assert_close(got[..., :4], rotate(x[..., :4].contiguous(), cos, sin))


@pytest.mark.parametrize("device", DEVICES)
def test_centred_and_gated_norm(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(5)
    x, gate = (torch.randn(4, 16, generator=generator).to(torch.bfloat16) for _ in range(2))
    weight = torch.linspace(-0.5, 1, 16).to(torch.bfloat16)
    wide, z = x.double(), gate.double()
    unit = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    centred = rms_norm_centred(x.to(device), weight.to(device), 1e-6).cpu()
    torch.testing.assert_close(centred, (unit * (1 + weight.double())).to(torch.bfloat16), atol=0, rtol=0.01)
    gated = rms_norm_gated(x.to(device), gate.to(device), weight.to(device), 1e-6).cpu()
    expected = unit * weight.double() * z * z.sigmoid()
    torch.testing.assert_close(gated, expected.to(torch.bfloat16), atol=1e-6, rtol=0.01)


def test_the_result_may_have_another_dtype() -> None:
    generator = torch.Generator().manual_seed(6)
    x, gate = torch.randn(2, 4, 16, generator=generator)
    weight = torch.linspace(-0.5, 1, 16).to(torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        centred = rms_norm_centred(x, weight, 1e-6, dtype)
        assert torch.equal(centred, rms_norm_centred(x, weight, 1e-6).to(dtype))
        assert torch.equal(
            rms_norm_gated(x.half(), gate, weight, 1e-6, dtype),
            rms_norm_gated(x.half().float(), gate, weight, 1e-6).to(dtype),
        )
        assert centred.dtype == dtype
