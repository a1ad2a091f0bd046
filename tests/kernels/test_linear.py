import pytest
import torch

from kernels.linear import linear
from tests.devices import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 32, 33])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear(device: torch.device, dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 48, generator=generator), torch.randn(20, 48, generator=generator)
    bias = torch.randn(20, generator=generator) if with_bias else None
    x, weight = x.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    got = linear(x.to(device), weight.to(device), None if bias is None else bias.to(device))
    assert got.dtype == dtype
    assert got.is_contiguous()
    atol = 1e-4 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(got.double().cpu(), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_a_wide_result_of_half_precision(device: torch.device, rows: int, half: torch.dtype) -> None:
    """Nothing is rounded behind the inputs, and what a wide residual has is not lost."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 48, generator=generator).to(device, half)
    weight = torch.randn(20, 48, generator=generator).to(device, half)
    bias = torch.randn(20, generator=generator).to(device, half)
    residual = torch.randn(rows, 20, generator=generator).to(device)
    exact = x.double() @ weight.double().t()
    for got, expected in (
        (linear(x, weight, dtype=torch.float32), exact),
        (linear(x, weight, bias, dtype=torch.float32), exact + bias.double()),
        (linear(x, weight, residual=residual), exact + residual.double()),
        (linear(x, weight, bias, residual), exact + bias.double() + residual.double()),
    ):
        assert got.dtype == torch.float32
        assert got.is_contiguous()
        torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=0)
