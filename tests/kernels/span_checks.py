"""A gated delta net's spans, on any device that Triton's kernels run on: what stands before the rule against the torch
operations, and all of it against the rule token by token."""

from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from kernels.conv import reference as conv_reference
from kernels.conv.rows import convolve_one
from kernels.gated_delta import reference
from kernels.gated_delta.front import front
from kernels.gated_delta.launch import SpanLaunch
from kernels.gated_delta.net import NetInputs, NetWeights, gates
from kernels.gated_delta.packed import PackedRows
from kernels.gated_delta.spans import prefill
from kernels.state_plan import PackedSpans, StatePlan, StateSpan
from tests.kernels.replay_checks import Kinds, Shape, bits, relative

_BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of a number: float32's are sums in another order; of 16 bits two units in the last place, since unit vectors are
rounded twice."""


@dataclass(frozen=True, slots=True)
class Step:
    """A layer's inputs whose other rows, and a pool whose other slots, are poisoned."""

    net: NetWeights
    inputs: NetInputs
    columns: Tensor
    states: Tensor
    plan: StatePlan
    packed: PackedSpans


def step(
    shape: Shape, kinds: Kinds, counts: tuple[int, ...], device: torch.device, seed: int, x: torch.dtype, gaps: bool
) -> Step:
    """Spans of so many tokens, of one too, in random slots; x: dtype of the inputs. gaps: with rows of nobody's before
    and behind each span."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device)

    gap = 2 if gaps else 0
    firsts = [gap + sum(counts[:span]) + span * gap for span in range(len(counts))]
    total = sum(counts) + (len(counts) + 1) * gap
    pool = 2 * len(counts) + 1
    slots = torch.randperm(pool, generator=generator)[: len(counts)]
    spans = tuple(StateSpan(*values) for values in zip(firsts, counts, slots.tolist(), strict=True))
    tokens = torch.cat([torch.arange(span.first, span.first + span.count) for span in spans]).to(device)
    borders = torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)
    packed = PackedSpans(tokens, borders, slots.to(device))
    nobody = torch.empty(0, dtype=torch.int64, device=device)

    heads, channels = shape.value_heads, shape.channels
    mixed = normal(total, channels + 32)[:, :channels].to(x)
    b, a = (normal(total, 2 * heads) * 2).chunk(2, dim=1)
    states = (normal(pool, heads, shape.key_dim, shape.value_dim) * 0.1).to(kinds.state)
    columns = normal(pool, 2, shape.width - 1, channels).to(kinds.model)[:, 1]
    others = [slot for slot in range(pool) if slot not in slots.tolist()]
    rest = [row for row in range(total) if row not in tokens.tolist()]
    for each in (states, columns):
        each[others] = torch.nan
    for each in (mixed, a, b):
        each[rest] = torch.nan
    net = NetWeights(
        taps=(normal(shape.width, channels) * 0.5).to(kinds.model),
        a_log=normal(heads) * 2,
        dt_bias=normal(heads) * 3,
        key_heads=shape.key_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
    )
    return Step(net, NetInputs(mixed, a, b), columns, states, StatePlan(spans, packed, nobody, nobody), packed)


def in_torch(it: Step, columns: Tensor, inner: torch.dtype, unit: bool) -> PackedRows:
    """As `front`, by operations of torch."""
    tokens, net = it.packed.tokens, it.net
    mixed = conv_reference.causal_conv(it.inputs.mixed, net.taps, columns, it.plan, inner)[tokens]
    q, k, v = mixed.split((net.key_width, net.key_width, net.value_heads * net.value_dim), dim=1)
    keys = [x.unflatten(1, (net.key_heads, net.key_dim)) for x in (q, k)]
    if unit:
        keys = [(x.float() * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(inner) for x in keys]
    g, beta = gates(it.inputs.a[tokens], it.inputs.b[tokens], net)
    return PackedRows(keys[0], keys[1], v.unflatten(1, (net.value_heads, net.value_dim)), g, beta, unit)


def check_front(it: Step, inner: torch.dtype, unit: bool, launch: SpanLaunch | None = None) -> None:
    columns, expected_columns = it.columns.clone(), it.columns.clone()
    expected = in_torch(it, expected_columns, inner, unit)
    got = _front(it, columns, inner, unit, launch)
    bound = _BOUNDS[inner]
    for name in ("q", "k", "v"):
        x, y = getattr(got, name), getattr(expected, name)
        assert x.dtype == inner
        assert x.is_contiguous()
        assert bool(x.isfinite().all())
        torch.testing.assert_close(
            x, y, rtol=bound, atol=max(bound / 100, 5e-6), msg=lambda text, name=name: f"{name}: {text}"
        )
    torch.testing.assert_close(got.g, expected.g, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(got.beta, expected.beta, rtol=1e-5, atol=0.0)
    assert torch.equal(bits(columns), bits(expected_columns))


def check_rows(it: Step, inner: torch.dtype, launch: SpanLaunch | None = None) -> None:
    """Bit for bit what `convolve_one` makes of one row after the other, columns too. The columns' dtype is x's."""
    columns, expected_columns, device = it.columns.clone(), it.columns.clone(), it.columns.device
    got = _front(it, columns, inner, False, launch)
    place = 0
    for span in it.plan.spans:
        for token in range(span.first, span.first + span.count):
            first = torch.empty(1, 2 * it.net.key_width, dtype=inner, device=device)
            second = torch.empty(1, it.net.value_heads * it.net.value_dim, dtype=inner, device=device)
            slot, row = (torch.tensor([n], device=device) for n in (span.slot, token))
            convolve_one(it.inputs.mixed, it.net.taps, expected_columns, slot, row, first, second)
            for x, y in zip((got.q, got.k), first.chunk(2, dim=1), strict=True):
                assert torch.equal(bits(x[place].flatten()), bits(y[0]))
            assert torch.equal(bits(got.v[place].flatten()), bits(second[0]))
            place += 1
    assert torch.equal(bits(columns), bits(expected_columns))


def _front(it: Step, columns: Tensor, inner: torch.dtype, unit: bool, launch: SpanLaunch | None) -> PackedRows:
    if launch is None:
        return front(it.inputs, it.net, columns, it.plan, inner, unit)
    with patch("kernels.gated_delta.front.span_launch", return_value=launch):
        return front(it.inputs, it.net, columns, it.plan, inner, unit)


def check_saturation(it: Step, unit: bool) -> None:
    """In float16; with `unit` a norm of what saturated. A number that is none stays none, in its channel only."""
    it.columns[:] = 0
    for tokens in (it.plan.spans[0].first, it.plan.spans[0].first + 1):
        it.inputs.mixed[tokens] = 1e6
        it.inputs.mixed[tokens, -1] = torch.nan
    it.net.taps.fill_(1)
    got = front(it.inputs, it.net, it.columns, it.plan, torch.float16, unit)
    largest = it.net.key_dim**-0.5 if unit else 65504.0
    for x in (got.q[:2], got.k[:2]):
        torch.testing.assert_close(x, torch.full_like(x, largest), rtol=1e-3, atol=0.0)
    v = got.v[:2].flatten(1)
    assert bool((v[:, :-1] == 65504).all())
    assert bool(v[:, -1].isnan().all())


def check_prefill(it: Step, inner: torch.dtype, bound: float) -> None:
    """Against the rule token by token in float32, of inputs by operations of torch."""
    columns, expected_columns = it.columns.clone(), it.columns.clone()
    states, expected_states = it.states.clone(), it.states.clone()
    o = prefill(it.inputs, it.net, columns, states, it.plan, inner)
    rows = in_torch(it, expected_columns, torch.float32, unit=False)
    size, tokens = (len(it.inputs.mixed), *rows.v.shape[1:]), it.packed.tokens
    flat = [x.new_zeros(len(it.inputs.mixed), *x.shape[1:]) for x in (rows.q, rows.k, rows.v, rows.g, rows.beta)]
    for to, x in zip(flat, (rows.q, rows.k, rows.v, rows.g, rows.beta), strict=True):
        to[tokens] = x
    expected = torch.empty(size, device=o.device)
    reference.recurrent(flat[0], flat[1], flat[2], flat[3], flat[4], expected_states, it.plan, expected)
    assert (o.shape, o.dtype) == (size, inner)
    assert o.is_contiguous()
    assert relative(o[tokens], expected[tokens].double()) < bound
    slots = it.packed.slots
    assert relative(states[slots], expected_states[slots].double()) < bound
    states[slots] = it.states[slots]
    assert torch.equal(bits(states), bits(it.states))  # nobody's are as they were
    assert torch.equal(bits(columns), bits(expected_columns))
