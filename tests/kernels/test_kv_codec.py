import pytest
import torch

from kernels import kv_codec
from tests.devices import DEVICES


@pytest.mark.parametrize("device", DEVICES)
def test_write_goes_to_its_places_and_nowhere_else(device: torch.device) -> None:
    pool = torch.zeros(4, 2, 2, 8, 3, 5, device=device)  # pages, layers, K and V, tokens, heads, dims
    k = torch.randn(6, 3, 5, device=device)
    v = torch.randn(6, 3, 5, device=device)
    pages = torch.tensor([3, 3, 0, 0, 1, 3], device=device)
    offsets = torch.tensor([7, 0, 2, 3, 7, 1], device=device)
    kv_codec.write(pool[:, 1, 0], pool[:, 1, 1], k, v, pages, offsets)
    for n, (page, offset) in enumerate(zip(pages.tolist(), offsets.tolist(), strict=True)):
        assert torch.equal(pool[page, 1, 0, offset], k[n])
        assert torch.equal(pool[page, 1, 1, offset], v[n])
    assert int((pool != 0).any(-1).any(-1).sum()) == 12
    assert bool((pool[:, 0] == 0).all())
