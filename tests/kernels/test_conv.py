import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.conv import causal_conv
from kernels.state_plan import plan_recurrence
from tests.devices import DEVICES

CPU = torch.device("cpu")
CHANNELS = 5


def whole(x: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """A sequence from its start, by torch's convolution."""
    width = len(taps)
    padded = torch.nn.functional.pad(x.t()[None], (width - 1, 0))
    return torch.nn.functional.silu(torch.nn.functional.conv1d(padded, taps.t()[:, None], groups=x.shape[1]))[0].t()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [2, 4])
def test_cuts_shorter_and_longer_than_the_taps(device: torch.device, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, taps = torch.randn(40, CHANNELS, generator=generator), torch.randn(width, CHANNELS, generator=generator)
    columns = torch.zeros(3, width - 1, CHANNELS, device=device)
    got = []
    for part in x.split([1, 1, 2, 3, 1, 20, 2, 1, 1, 8]):
        got.append(causal_conv(part.to(device), taps.to(device), columns, plan_recurrence([len(part)], [2], device)))
    torch.testing.assert_close(torch.cat(got).cpu(), whole(x, taps), atol=1e-6, rtol=1e-5)
    assert torch.equal(columns[2].cpu(), x[-(width - 1) :])
    assert not columns[:2].any()


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_cuts_in_any_batch(data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = data.draw(st.tuples(*[st.integers(1, 20)] * 3))
    sequences = [torch.randn(length, CHANNELS, generator=generator) for length in lengths]
    taps = torch.randn(4, CHANNELS, generator=generator)
    columns = torch.zeros(3, 3, CHANNELS)
    at = [0, 0, 0]
    while any(start < length for start, length in zip(at, lengths, strict=True)):
        running = [n for n in data.draw(st.permutations(range(3))) if at[n] < lengths[n]]
        counts = [min(data.draw(st.integers(1, 8)), lengths[n] - at[n]) for n in running]
        batch = torch.cat([sequences[n][at[n] : at[n] + c] for n, c in zip(running, counts, strict=True)])
        out = causal_conv(batch, taps, columns, plan_recurrence(counts, running, CPU))
        for n, count, piece in zip(running, counts, out.split(counts), strict=True):
            expected = whole(sequences[n], taps)[at[n] : at[n] + count]
            torch.testing.assert_close(piece, expected, atol=1e-6, rtol=1e-5)
            at[n] += count


def test_dtype_is_kept_and_the_sum_is_wide() -> None:
    x = torch.randn(9, CHANNELS, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    taps = torch.randn(4, CHANNELS, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    out = causal_conv(x, taps, torch.zeros(1, 3, CHANNELS, dtype=torch.bfloat16), plan_recurrence([9], [0], CPU))
    assert torch.equal(out, whole(x.float(), taps.float()).to(torch.bfloat16))


@pytest.mark.parametrize("device", DEVICES)
def test_wide_inputs_are_rounded_only_in_the_columns(device: torch.device) -> None:
    x = torch.randn(9, CHANNELS, generator=torch.Generator().manual_seed(4))
    taps = torch.randn(4, CHANNELS, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    columns = torch.zeros(1, 3, CHANNELS, dtype=torch.bfloat16, device=device)
    parts = []
    for part in x.split([7, 1, 1]):
        plan = plan_recurrence([len(part)], [0], device)
        parts.append(causal_conv(part.to(device), taps.to(device), columns, plan, torch.float16).cpu())
    assert torch.equal(parts[0], whole(x[:7], taps.float()).to(torch.float16))
    seen = torch.cat((x[4:8].to(torch.bfloat16).float(), x[8:]))
    torch.testing.assert_close(parts[2], whole(seen, taps.float())[-1:].to(torch.float16), atol=1e-3, rtol=1e-3)
    assert torch.equal(columns[0].cpu(), x[-3:].to(torch.bfloat16))


@pytest.mark.parametrize("count", [1, 2])
def test_float16_saturates(count: int) -> None:
    columns = torch.zeros(1, 3, CHANNELS)
    plan = plan_recurrence([count], [0], CPU)
    out = causal_conv(torch.full((count, CHANNELS), 1e6), torch.ones(4, CHANNELS), columns, plan, torch.float16)
    assert torch.equal(out, torch.full((count, CHANNELS), 65504.0, dtype=torch.float16))
