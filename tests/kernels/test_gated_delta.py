import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.gated_delta import flash, gated_delta, prepare, reference
from kernels.state_plan import plan_recurrence
from tests.devices import DEVICES

CPU = torch.device("cpu")
KEY_HEADS, VALUE_HEADS, K, V = 2, 6, 12, 20
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(tokens: int, seed: int, decay: float = 0.1) -> Inputs:
    """q, k, v, g, beta in float32; every token forgets up to `decay` nats."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    return (
        normal(tokens, KEY_HEADS, K) * 3,
        normal(tokens, KEY_HEADS, K) * 0.2,
        normal(tokens, VALUE_HEADS, V),
        -decay * torch.rand(tokens, VALUE_HEADS, generator=generator),
        torch.rand(tokens, VALUE_HEADS, generator=generator),
    )


def by_definition(rows: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The formula of the op's docstring in float64: token by token, head by head. state [VALUE_HEADS, K, V]."""
    q, k, v, g, beta = (x.double() for x in rows)
    state = state.double().clone()
    out = torch.empty(v.shape, dtype=torch.float64)
    for token in range(len(v)):
        for head in range(VALUE_HEADS):
            key, query = k[token, head // 3], q[token, head // 3]
            key = key / (key.square().sum() + 1e-6).sqrt()
            query = query / (query.square().sum() + 1e-6).sqrt()
            s = g[token, head].exp() * state[head]
            u = beta[token, head] * (v[token, head] - key @ s)
            state[head] = s + torch.outer(key, u)
            out[token, head] = query @ state[head] / K**0.5
    return out, state


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double().cpu() - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("decay", [0.0, 0.1, 20.0])
@pytest.mark.parametrize("count", [1, 2, 3, 63, 64, 65, 130, 192])
def test_one_sequence(device: torch.device, count: int, decay: float) -> None:
    rows = inputs(count, seed=count, decay=decay)
    start = torch.randn(3, VALUE_HEADS, K, V, generator=torch.Generator().manual_seed(0))
    expected, after = by_definition(rows, start[1])
    states = start.clone().to(device)
    out = gated_delta(*(x.to(device) for x in rows), states, plan_recurrence([count], [1], device))
    assert relative(out, expected) < 1e-5
    assert relative(states[1], after) < 1e-5
    assert torch.equal(states[[0, 2]].cpu(), start[[0, 2]])


def test_the_recurrent_reference_is_the_definition() -> None:
    rows = inputs(20, seed=1)
    states = torch.zeros(1, VALUE_HEADS, K, V)
    expected, after = by_definition(rows, states[0])
    out = torch.empty_like(rows[2])
    reference.recurrent(*rows, states, plan_recurrence([20], [0], CPU), out)
    assert relative(out, expected) < 1e-6
    assert relative(states[0], after) < 1e-6


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_cuts_in_any_batch(data: st.DataObject) -> None:
    """Three sequences, cut anywhere and run beside each other, against the recurrence from start to end."""
    lengths = data.draw(st.tuples(*[st.integers(1, 150)] * 3))
    sequences = [inputs(length, seed) for seed, length in enumerate(lengths)]
    expected: list[Tensor] = []
    final = torch.zeros(3, VALUE_HEADS, K, V)
    for slot, (rows, length) in enumerate(zip(sequences, lengths, strict=True)):
        out = torch.empty_like(rows[2])
        reference.recurrent(*rows, final, plan_recurrence([length], [slot], CPU), out)
        expected.append(out)
    states = torch.zeros(3, VALUE_HEADS, K, V)
    at = [0, 0, 0]
    while any(start < length for start, length in zip(at, lengths, strict=True)):
        running = [n for n in data.draw(st.permutations(range(3))) if at[n] < lengths[n]]
        counts = [data.draw(st.one_of(st.just(1), st.integers(1, 150))) for _ in running]
        counts = [min(count, lengths[n] - at[n]) for n, count in zip(running, counts, strict=True)]
        parts = [tuple(x[at[n] : at[n] + c] for x in sequences[n]) for n, c in zip(running, counts, strict=True)]
        batch = tuple(torch.cat(each) for each in zip(*parts, strict=True))
        out = gated_delta(*batch, states, plan_recurrence(counts, running, CPU))
        for n, count, piece in zip(running, counts, out.split(counts), strict=True):
            torch.testing.assert_close(piece, expected[n][at[n] : at[n] + count], rtol=1e-4, atol=1e-5)
            at[n] += count
    torch.testing.assert_close(states, final, rtol=1e-4, atol=1e-5)


def test_a_broken_sequence_does_not_touch_another() -> None:
    good, bad = inputs(70, seed=1), inputs(70, seed=2)
    bad[2].fill_(torch.nan)
    states = torch.zeros(2, VALUE_HEADS, K, V)
    batch = tuple(torch.cat(pair) for pair in zip(bad, good, strict=True))
    out = gated_delta(*batch, states, plan_recurrence([70, 70], [0, 1], CPU))
    assert bool(out[:70].isnan().all())
    assert bool(out[70:].isfinite().all())
    assert bool(states[1].isfinite().all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", ["recurrent", "op"])
def test_half_states_are_rounded_once(way: str, kind: torch.dtype, device: torch.device) -> None:
    """Bit for bit what float32 states give, outputs too, and rounded when they are stored; from states that are not
    zero, for spans and singles."""
    counts, slots = [1, 65, 130, 1], [2, 0, 4, 1]
    q, k, v, g, beta = (x.to(device) for x in inputs(sum(counts), seed=3))
    plan = plan_recurrence(counts, slots, device)
    half = torch.randn(5, VALUE_HEADS, K, V, generator=torch.Generator().manual_seed(0)).to(device, kind)
    wide = half.float()
    outs = []
    for states in (half, wide):
        out = torch.empty_like(v)
        if way == "recurrent":
            reference.recurrent(q, k, v, g, beta, states, plan, out)
        else:
            out = gated_delta(q, k, v, g, beta, states, plan)
        outs.append(out)
    assert torch.equal(*outs)
    assert torch.equal(half, wide.to(kind))
    assert not torch.equal(half.float(), wide)


@pytest.mark.parametrize("way", ["recurrent", "op"])
def test_half_states_saturate(way: str) -> None:
    """In float16, at both ends; what is not a number stays none, and other dtypes hold the value."""
    counts = [1, 3]
    q, k, v, g, beta = inputs(sum(counts), seed=4, decay=0.0)
    v *= 1e6
    v[:, 0] = torch.nan
    plan = plan_recurrence(counts, [0, 1], CPU)
    for kind in (torch.float16, torch.bfloat16):
        states = torch.zeros(2, VALUE_HEADS, K, V, dtype=kind)
        if way == "op":
            gated_delta(q, k, v, g, beta, states, plan)
        else:
            reference.recurrent(q, k, v, g, beta, states, plan, torch.empty_like(v))
        assert bool(states[:, 0].isnan().all())
        rest = states[:, 1:].float()
        assert bool(rest.isfinite().all())
        assert (float(rest.max()), float(rest.min())) == (65504, -65504) or kind == torch.bfloat16
        assert float(rest.abs().max()) >= 65504


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_flash_linear_attention_agrees(kind: torch.dtype) -> None:
    """The 35B-A3B's shape in bfloat16, spans of any length beside decodes, from states that are not zero."""
    pytest.importorskip("fla")
    cuda = torch.device("cuda")
    counts, slots = [70, 1, 2, 500, 1, 64], [3, 0, 5, 1, 4, 2]
    generator = torch.Generator().manual_seed(0)
    total = sum(counts)
    q, k = (torch.randn(total, 16, 128, generator=generator).to(cuda, torch.bfloat16) for _ in range(2))
    v = torch.randn(total, 32, 128, generator=generator).to(cuda, torch.bfloat16)
    g = -0.1 * torch.rand(total, 32, generator=generator).to(cuda)
    beta = torch.rand(total, 32, generator=generator).to(cuda)
    start = (torch.randn(6, 32, 128, 128, generator=generator) * 0.1).to(cuda, kind)
    prepare(16, 32, 128, 128, 4, torch.bfloat16, torch.bfloat16, cuda)
    plan = plan_recurrence(counts, slots, cuda)
    states, exact_states = start.clone(), start.clone()
    out = gated_delta(q, k, v, g, beta, states, plan)
    exact = torch.empty_like(v)
    reference.chunked(q, k, v, g, beta, exact_states, plan, exact)
    reference.single(q, k, v, g, beta, exact_states, plan, exact)
    assert relative(out, exact.double().cpu()) < 0.01
    assert relative(states, exact_states.double().cpu()) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_never_imports_flash_linear_attention(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is installed with every engine, and its import looks for a GPU."""
    monkeypatch.setattr(flash, "_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "fla", None)
    prepare(KEY_HEADS, VALUE_HEADS, K, V, 4, dtype, dtype, CPU)
    q, k, v, g, beta = inputs(70, seed=0)
    states = torch.zeros(1, VALUE_HEADS, K, V)
    out = gated_delta(q.to(dtype), k.to(dtype), v.to(dtype), g, beta, states, plan_recurrence([70], [0], CPU))
    assert bool(out.isfinite().all())
    assert bool(states.any())
