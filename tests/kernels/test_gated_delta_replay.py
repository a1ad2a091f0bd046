"""A gated delta net's few rows a sequence: decode, verify and fold."""

import re

import pytest
import torch
from torch import Tensor

from kernels import gated_delta
from kernels.conv import causal_conv
from kernels.conv import triton as conv_kernels
from kernels.gated_delta import NetInputs, replay_reference
from kernels.gated_delta import triton as kernels
from kernels.gated_delta.launch import state_launch
from kernels.gated_delta.net import gates
from kernels.state_plan import plan_recurrence
from tests.kernels.compiled import SHARED_LIMIT, ahead_of_time, run_interpreted, usage
from tests.kernels.replay_checks import SERVED, WIDE, Bench, Kinds, Shape, bits, check_replay, relative

CPU = torch.device("cpu")
ACCEPTED = ((4, 2), (0, 0), (1, 1), (6, 6), (3, 0))
HALF_STATES = [
    Kinds(torch.bfloat16, torch.float16, torch.float16),
    Kinds(torch.bfloat16, torch.float16, torch.bfloat16),
]


@pytest.mark.parametrize("kinds", [WIDE, SERVED, *HALF_STATES])
@pytest.mark.parametrize("shape", [Shape(2, 6, 12, 20), Shape(2, 4, 64, 64)])
def test_reference(shape: Shape, kinds: Kinds) -> None:
    bound = 1e-5 if kinds is WIDE else 3e-2
    check_replay(replay_reference, shape, kinds, ACCEPTED, CPU, bound)


@pytest.mark.parametrize("kinds", [WIDE, SERVED])
def test_decode_on_a_cpu_is_convolution_and_rule_apart(kinds: Kinds) -> None:
    """Bit for bit: an engine without a GPU runs them apart, and may mix them with `verify`."""
    bench = Bench(Shape(2, 4, 64, 64), kinds, (1, 1, 1), CPU, seed=5)
    net, inputs = bench.nets[0], bench.step()[0]
    columns, states = bench.columns[:, 0], bench.states[:, 0]
    one_columns, one_states, out = columns.clone(), states.clone(), bench.out(kinds.inner)[0]
    gated_delta.decode(inputs, net, one_columns, one_states, bench.slots, bench.rows.tokens, out)

    rows = NetInputs(*(x[bench.rows.tokens] for x in (inputs.mixed, inputs.a, inputs.b)))
    plan = plan_recurrence([1, 1, 1], bench.slots.tolist(), CPU)
    mixed = causal_conv(rows.mixed, net.taps, columns, plan, kinds.inner)
    q, k, v = mixed.split((128, 128, 256), dim=1)
    g, beta = gates(rows.a, rows.b, net)
    heads = (q.unflatten(1, (2, 64)), k.unflatten(1, (2, 64)), v.unflatten(1, (4, 64)))
    apart = gated_delta.gated_delta(*heads, g, beta, states, plan)
    assert torch.equal(out[bench.rows.tokens], apart)
    assert torch.equal(bits(one_states), bits(states))
    assert torch.equal(bits(one_columns), bits(columns))


def test_half_states_saturate() -> None:
    """And the output, of the state before rounding, tells nothing of it."""
    bench = Bench(Shape(1, 1, 16, 16), Kinds(torch.float32, torch.float32, torch.float16), (1,), CPU, seed=6)
    bench.columns.fill_(0)
    bench.states.fill_(60000)
    inputs = bench.step()[0]
    inputs.mixed[:, 32:].fill_(1e6)  # v
    inputs.a.fill_(-100)  # nothing is forgotten
    inputs.b.fill_(100)
    net, out = bench.nets[0], bench.out(torch.float32)[0]
    net.taps.fill_(1)
    gated_delta.decode(inputs, net, bench.columns[:, 0], bench.states[:, 0], bench.slots, bench.rows.tokens, out)
    slot = int(bench.slots[0])
    assert float(bench.states[slot, 0].abs().max()) == 65504
    assert bool(out[bench.rows.tokens].isfinite().all())


def test_interpreted() -> None:
    run_interpreted("tests.kernels.interpreted_gated_delta")


@pytest.mark.parametrize(
    ("capability", "state"), [(80, "fp32"), (89, "fp32"), (90, "fp32"), (90, "bf16"), (90, "fp16"), (120, "fp32")]
)
def test_compiled_ahead_of_time(capability: int, state: str) -> None:
    """The 27B's shape: nothing is spilled, and all three add up over the keys in the same order."""
    launch = state_launch(128, 4 if state == "fp32" else 2)
    shapes = {"HEADS": 48, "GROUP": 3, "K": 128, "V": 128, "BK": 128, "BV": launch.columns}
    pointers = {
        **dict.fromkeys(("q_ptr", "kv_ptr", "out_ptr"), "*fp16"),
        **dict.fromkeys(("a_ptr", "b_ptr", "a_log_ptr", "bias_ptr", "g_ptr", "beta_ptr"), "*fp32"),
        **dict.fromkeys(("slots_ptr", "tokens_ptr", "places_ptr"), "*i64"),
        **dict.fromkeys(("counts_ptr", "accepted_ptr"), "*i32"),
        "states_ptr": f"*{state}",
        "factor": "fp32",
    }
    variants = [(kernels.stream, {"RECORD": record, "PDL": capability >= 90}) for record in (False, True)]
    orders = []
    for kernel, flags in [*variants, (kernels.fold, {})]:
        done = ahead_of_time(kernel, {**shapes, **flags}, pointers, capability, launch.warps, enable_fp_fusion=False)
        used = usage(done)
        assert (used["STACK"], used["LOCAL"]) == (0, 0)
        assert used["SHARED"] <= SHARED_LIMIT
        orders.append(reductions(done.asm["ttgir"]))
    assert {shape for shape, _ in orders[0]} == {"128", f"128x{launch.columns}"}
    assert orders[0] == orders[1] == orders[2]


def reductions(ttgir: str) -> set[tuple[str, str]]:
    """Shape and layout of what is reduced: with them the order of its sum is fixed."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<.*>)$", ttgir, re.MULTILINE))
    found = re.findall(r"^\s*\}\) : \(tensor<([\dx]+)xf32, (#\w+)>\) -> ", ttgir, re.MULTILINE)
    return {(shape, layouts[name]) for shape, name in found}


@pytest.mark.parametrize("capability", [80, 120])
def test_convolution_compiled_ahead_of_time(capability: int) -> None:
    pointers = {
        **dict.fromkeys(("first_ptr", "second_ptr"), "*fp16"),
        **dict.fromkeys(("taps_ptr", "columns_ptr", "record_ptr"), "*bf16"),
        **dict.fromkeys(("slots_ptr", "tokens_ptr", "places_ptr"), "*i64"),
        **dict.fromkeys(("counts_ptr", "accepted_ptr"), "*i32"),
        "x_ptr": "*fp32",
    }
    flags = {"WIDTH": 4, "BC": 128}
    for kernel, constants in (
        (conv_kernels.convolve, {**flags, "RECORD": True, "PDL": capability >= 90}),
        (conv_kernels.fold, flags),
    ):
        used = usage(ahead_of_time(kernel, constants, pointers, capability, 1))
        assert (used["STACK"], used["LOCAL"]) == (0, 0)


def test_launches() -> None:
    """Rows of 64 bytes, no wider than a state."""
    assert [state_launch(128, size).columns for size in (4, 2)] == [16, 32]
    assert [state_launch(dim, 4).columns for dim in (1, 8, 9, 20)] == [1, 8, 16, 16]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnGpu:
    @pytest.mark.parametrize("kinds", [WIDE, SERVED, *HALF_STATES])
    @pytest.mark.parametrize(
        "shape", [Shape(16, 48, 128, 128), Shape(16, 32, 128, 128), Shape(2, 4, 64, 64), Shape(2, 6, 12, 20)]
    )
    def test_replay(self, shape: Shape, kinds: Kinds) -> None:
        """The 27B's shape, the 35B's, the small model's and an odd one."""
        bound = 1e-5 if kinds is WIDE else 3e-2
        many = ((16, 5), *ACCEPTED, (8, 8), (16, 16), (2, 1))
        check_replay(gated_delta, shape, kinds, many, torch.device("cuda"), bound)

    def test_a_sequence_gets_the_bits_that_it_gets_alone(self) -> None:
        cuda = torch.device("cuda")
        bench = Bench(Shape(16, 48, 128, 128), SERVED, (1,) * 16, cuda, seed=7)
        net, inputs, out = bench.nets[0], bench.step()[0], bench.out(torch.float16)[0]
        columns, states = bench.columns[:, 0], bench.states[:, 0]
        one_columns, one_states, one_out = columns.clone(), states.clone(), out.clone()
        gated_delta.decode(inputs, net, columns, states, bench.slots, bench.rows.tokens, out)
        for sequence in range(16):
            one = slice(sequence, sequence + 1)
            slots, tokens = bench.slots[one].clone(), bench.rows.tokens[one].clone()
            gated_delta.decode(inputs, net, one_columns, one_states, slots, tokens, one_out)
        for whole, alone in ((out, one_out), (states, one_states), (columns, one_columns)):
            assert torch.equal(bits(whole), bits(alone))

    def test_kernels_that_overlap(self) -> None:
        """Steps behind each other, of which each begins before the one before has ended."""
        cuda = torch.device("cuda")
        bench = Bench(Shape(16, 48, 128, 128), SERVED, (1,) * 4, cuda, seed=8)
        steps = [bench.step()[0] for _ in range(32)]

        def run(wait: bool) -> tuple[Tensor, Tensor]:
            columns, states = bench.columns[:, 0].clone(), bench.states[:, 0].clone()
            outs = [bench.out(torch.float16)[0] for _ in steps]
            for inputs, out in zip(steps, outs, strict=True):
                gated_delta.decode(inputs, bench.nets[0], columns, states, bench.slots, bench.rows.tokens, out)
                if wait:
                    torch.cuda.synchronize()
            return torch.stack(outs), states

        for fast, slow in zip(run(wait=False), run(wait=True), strict=True):
            assert torch.equal(bits(fast), bits(slow))

    def test_captured(self) -> None:
        """A graph with places for more sequences than there are, replayed for others than it was captured with."""
        cuda = torch.device("cuda")
        bench = Bench(Shape(16, 32, 128, 128), SERVED, (1,) * 4, cuda, seed=9)
        net, inputs = bench.nets[0], bench.step()[0]
        columns, states, out = bench.columns[:, 0].clone(), bench.states[:, 0].clone(), bench.out(torch.float16)[0]
        slots, tokens = torch.full((8,), -1, device=cuda), torch.zeros(8, dtype=torch.int64, device=cuda)
        gated_delta.decode(inputs, net, columns, states, slots, tokens, out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gated_delta.decode(inputs, net, columns, states, slots, tokens, out)
        slots[2:6], tokens[2:6] = bench.slots, bench.rows.tokens
        graph.replay()
        expected = bench.out(torch.float16)[0]
        gated_delta.decode(
            inputs, net, bench.columns[:, 0], bench.states[:, 0], bench.slots, bench.rows.tokens, expected
        )
        assert torch.equal(bits(out), bits(expected))
        assert torch.equal(bits(states), bits(bench.states[:, 0]))

    def test_near_the_reference(self) -> None:
        """In the served dtypes: apart by roundings of float16 only."""
        cuda = torch.device("cuda")
        bench = Bench(Shape(16, 48, 128, 128), SERVED, (1,) * 8, cuda, seed=10)
        net, inputs = bench.nets[0], bench.step()[0]
        results = []
        for ops in (gated_delta, replay_reference):
            columns, states, out = bench.columns[:, 0].clone(), bench.states[:, 0].clone(), bench.out(torch.float16)[0]
            ops.decode(inputs, net, columns, states, bench.slots, bench.rows.tokens, out)
            results.append((out[bench.rows.tokens], states[bench.slots], columns[bench.slots]))
        (out, states, columns), (exact_out, exact_states, exact_columns) = results
        assert relative(out, exact_out.double()) < 1e-3
        assert relative(states, exact_states.double()) < 1e-4
        assert torch.equal(columns, exact_columns)
