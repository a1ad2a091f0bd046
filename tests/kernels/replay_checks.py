"""Decode, verify and fold of a gated delta net against each other, bit for bit, and against float64; on any device."""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from kernels.gated_delta import replay_reference
from kernels.gated_delta.net import NetInputs, NetWeights, Records, empty_records
from kernels.state_plan import ReplayRows

LAYERS = 2
_UNWRITTEN = -1234.0


@dataclass(frozen=True, slots=True)
class Shape:
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class Kinds:
    """Dtypes."""

    model: torch.dtype
    inner: torch.dtype
    state: torch.dtype


WIDE = Kinds(torch.float32, torch.float32, torch.float32)
SERVED = Kinds(torch.bfloat16, torch.float16, torch.float32)


def bits(x: Tensor) -> Tensor:
    """So that NaN equals itself."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


class Bench:
    """A state pool whose other slots are poisoned, a net a layer, and steps whose other rows are."""

    def __init__(self, shape: Shape, kinds: Kinds, counts: tuple[int, ...], device: torch.device, seed: int) -> None:
        self.shape, self.kinds, self.counts, self.device = shape, kinds, counts, device
        self.generator = torch.Generator().manual_seed(seed)
        self.nets = [
            NetWeights(
                taps=(self.normal(shape.width, shape.channels) * 0.5).to(kinds.model),
                a_log=self.normal(shape.value_heads) * 2,
                dt_bias=self.normal(shape.value_heads) * 3,
                key_heads=shape.key_heads,
                key_dim=shape.key_dim,
                value_dim=shape.value_dim,
            )
            for _ in range(LAYERS)
        ]
        slots = 2 * len(counts) + 1
        size = (slots, LAYERS, shape.value_heads, shape.key_dim, shape.value_dim)
        self.states = (self.normal(*size) * 0.1).to(kinds.state)
        self.columns = self.normal(slots, LAYERS, shape.width - 1, shape.channels).to(kinds.model)
        self.slots = torch.randperm(slots, generator=self.generator)[: len(counts)].to(device)
        other = torch.ones(slots, dtype=torch.bool, device=device)
        other[self.slots] = False
        self.states[other] = torch.nan
        self.columns[other] = torch.nan
        self.rows = ReplayRows(
            self.slots,
            torch.tensor(_apart(counts), device=device),
            torch.tensor(counts, dtype=torch.int32, device=device),
            torch.tensor(_apart(counts[::-1])[::-1], device=device),
            max(counts),
        )
        self.size = 3 + len(counts) + sum(counts)

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator).to(self.device)

    def step(self) -> list[NetInputs]:
        """Of each layer. Rows are views of wider ones, and those of nobody are NaN."""
        steps = []
        for _ in range(LAYERS):
            mixed = self.normal(self.size, self.shape.channels + 32)[:, : self.shape.channels]
            b, a = self.normal(self.size, 2 * self.shape.value_heads).chunk(2, dim=1)
            taken = torch.zeros(self.size, dtype=torch.bool, device=self.device)
            for first, count in zip(self.rows.tokens.tolist(), self.counts, strict=True):
                taken[first : first + count] = True
            for x in (mixed, a, b):
                x[~taken] = torch.nan
            steps.append(NetInputs(mixed, a * 2, b * 2))
        return steps

    def out(self, kind: torch.dtype) -> Tensor:
        size = (LAYERS, self.size, self.shape.value_heads, self.shape.value_dim)
        return torch.full(size, torch.nan, dtype=kind, device=self.device)

    def records(self) -> Records:
        records = empty_records(LAYERS, self.size, self.nets[0], self.kinds.inner, self.kinds.model, self.device)
        for x in (records.keys_values, records.log_decay, records.beta, records.columns):
            x.fill_(_UNWRITTEN)
        return records

    def stepwise(
        self,
        ops: ModuleType,
        nets: list[NetWeights],
        steps: list[NetInputs],
        columns: Tensor,
        states: Tensor,
        out: Tensor,
    ) -> list[tuple[Tensor, Tensor]]:
        """`decode` row by row, in place. Returns columns and states after 0, 1, ... rows."""
        after = [(columns.clone(), states.clone())]
        for row in range(self.rows.longest):
            # Nobody's rows are in the batch too, as in a captured graph.
            slots = self.slots.where(self.rows.counts > row, -1)
            for layer, (net, inputs) in enumerate(zip(nets, steps, strict=True)):
                ops.decode(inputs, net, columns[:, layer], states[:, layer], slots, self.rows.tokens + row, out[layer])
            after.append((columns.clone(), states.clone()))
        return after


def _apart(counts: tuple[int, ...]) -> list[int]:
    """First rows, with a gap before each and behind the last."""
    return [1 + sum(counts[:sequence]) + sequence for sequence in range(len(counts))]


def check_replay(
    ops: ModuleType,
    shape: Shape,
    kinds: Kinds,
    accepted: tuple[tuple[int, int], ...],
    device: torch.device,
    bound: float,
    seed: int = 0,
    rounds: int = 2,
) -> None:
    """`accepted`: of each sequence, how many rows it verifies and how many of them are folded in the first round; later
    rounds fold others. `bound`: of the relative error of outputs and states against float64."""
    counts = tuple(count for count, _ in accepted)
    bench = Bench(shape, kinds, counts, device, seed)
    takes = torch.tensor([taken for _, taken in accepted], dtype=torch.int32, device=device)
    for _ in range(rounds):
        steps = bench.step()
        start_columns, start_states = bench.columns.clone(), bench.states.clone()

        out = bench.out(kinds.inner)
        after = bench.stepwise(ops, bench.nets, steps, bench.columns.clone(), bench.states.clone(), out)
        _check_exact(bench, steps, out, after[-1][1], bound)

        verified, records = bench.out(kinds.inner), bench.records()
        for layer, (net, inputs) in enumerate(zip(bench.nets, steps, strict=True)):
            columns, states = bench.columns[:, layer], bench.states[:, layer]
            ops.verify(inputs, net, columns, states, bench.rows, records, layer, verified[layer])
        assert torch.equal(bits(verified), bits(out))
        assert torch.equal(bits(bench.states), bits(start_states))
        assert torch.equal(bits(bench.columns), bits(start_columns))

        for place, count, taken in zip(bench.rows.places.tolist(), counts, takes.tolist(), strict=True):
            for x in (records.keys_values, records.log_decay, records.beta, records.columns):
                assert bool(x[:, place : place + count].isfinite().all())
                assert bool((x[:, place + count] == _UNWRITTEN).all())  # the gap
                x[:, place + taken : place + count] = torch.nan
        expected_columns, expected_states = start_columns.clone(), start_states.clone()
        for slot, taken in zip(bench.slots.tolist(), takes.tolist(), strict=True):
            expected_columns[slot], expected_states[slot] = after[taken][0][slot], after[taken][1][slot]
        ops.fold(bench.nets[0], bench.columns, bench.states, bench.slots, bench.rows.places, takes, records)
        assert torch.equal(bits(bench.states), bits(expected_states))
        assert torch.equal(bits(bench.columns), bits(expected_columns))
        takes = torch.tensor(counts, dtype=torch.int32, device=device) - takes


def _check_exact(bench: Bench, steps: list[NetInputs], out: Tensor, states: Tensor, bound: float) -> None:
    nets = [
        NetWeights(
            net.taps.double(), net.a_log.double(), net.dt_bias.double(), net.key_heads, net.key_dim, net.value_dim
        )
        for net in bench.nets
    ]
    exact = bench.out(torch.float64)
    exact_steps = [NetInputs(inputs.mixed.double(), inputs.a.double(), inputs.b.double()) for inputs in steps]
    exact_states = bench.states.double()
    bench.stepwise(replay_reference, nets, exact_steps, bench.columns.double(), exact_states, exact)
    rows = exact.isfinite()
    assert torch.equal(out.isfinite(), rows)
    assert int(rows.sum()) == LAYERS * sum(bench.counts) * bench.shape.value_heads * bench.shape.value_dim
    assert relative(out[rows], exact[rows]) < bound
    assert relative(states[bench.slots], exact_states[bench.slots]) < bound


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())
