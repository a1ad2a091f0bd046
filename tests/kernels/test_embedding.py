import pytest
import torch

from kernels.embedding import embed
from kernels.linear import weight
from kernels.linear.grouped import form
from kernels.linear.grouped import weight as grouped
from kernels.linear.quantized import FORMATS, dequantize
from services.engine.weights.codecs import encode
from tests.devices import DEVICES
from tests.engine.packed_source import quarters

ROWS = ([0], [299, 0, 128, 127, 299], [])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [256, 200])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_every_format(format: str, columns: int, device: torch.device) -> None:
    """Whatever their order; 300 rows and 200 columns fill no last block."""
    natural = encode(torch.randn(300, columns, generator=torch.Generator().manual_seed(1)), format)
    packed = weight.pack(natural).to(device)
    for rows in ROWS:
        got = embed(torch.tensor(rows, dtype=torch.int64, device=device), packed, torch.float32)
        assert torch.equal(got.cpu(), dequantize(natural)[rows])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_groups_and_of_plain_matrices(device: torch.device) -> None:
    values = torch.randn(300, 200, generator=torch.Generator().manual_seed(2))
    natural = quarters(values)
    packed = grouped.pack(natural).to(device)
    for rows in ROWS:
        index = torch.tensor(rows, dtype=torch.int64, device=device)
        assert torch.equal(embed(index, packed, torch.float32).cpu(), form.dequantize(natural)[rows])
        assert torch.equal(embed(index, values.to(device), torch.float32).cpu(), values[rows])
    square = torch.tensor([[1, 2], [3, 4]], device=device)
    assert torch.equal(embed(square, packed, torch.bfloat16).cpu(), form.dequantize(natural)[square.cpu()].bfloat16())
