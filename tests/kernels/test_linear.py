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
