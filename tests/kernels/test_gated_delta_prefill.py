"""A gated delta net's spans: what stands before the rule in one launch, and all of it."""

import pytest
import torch
from torch import Tensor

from kernels.gated_delta import front_triton as kernels
from kernels.gated_delta import gated_delta
from kernels.gated_delta.front import front
from kernels.gated_delta.launch import SpanLaunch, span_launch
from kernels.gated_delta.net import NetInputs
from kernels.gated_delta.spans import prefill
from kernels.gated_delta.tiles import tiles
from kernels.state_plan import plan_recurrence
from tests.kernels.compiled import ahead_of_time, run_interpreted, usage
from tests.kernels.replay_checks import SERVED, WIDE, Kinds, Shape, bits, relative
from tests.kernels.span_checks import Step, check_front, check_prefill, check_rows, check_saturation, in_torch, step

CPU = torch.device("cpu")
LARGE = Shape(16, 48, 128, 128)
LENGTHS = (3, 64, 1, 65, 2, 700, 63, 4)


def test_tiles() -> None:
    counts = [2, 64, 1, 65, 128, 3]
    cut = tiles(plan_recurrence(counts, range(6), CPU), 64, CPU)
    assert cut.borders.tolist() == [0, 2, 66, 131, 259, 262]  # without the single one
    assert cut.places.tolist() == [[0, 0], [1, 0], [2, 0], [2, 1], [3, 0], [3, 1], [4, 0]]


def test_tiles_of_equal_spans_are_the_same_tensors() -> None:
    """By them flash-linear-attention knows what it has computed."""
    one, other = (tiles(plan_recurrence([70, 5], slots, CPU), 64, CPU) for slots in ([0, 1], [3, 2]))
    assert one.borders is other.borders
    assert one.places is other.places
    assert tiles(plan_recurrence([70, 6], [0, 1], CPU), 64, CPU).borders is not one.borders


def test_interpreted() -> None:
    run_interpreted("tests.kernels.interpreted_spans")


@pytest.mark.parametrize("capability", [80, 89, 90, 120])
def test_compiled_ahead_of_time(capability: int) -> None:
    """The 27B's shape: nothing is spilled, the norms need no other warp, and float32 is read in 16 bytes a lane."""
    launch = span_launch(128)
    shapes = {"KEY_HEADS": 16, "HEADS": 48, "K": 128, "V": 128, "BK": 128, "BV": 128, "BH": 64, "WIDTH": 4}
    flags = {"SIZE": launch.elements, "ROWS": launch.rows, "UNIT": True, "PDL": capability >= 90}
    pointers = {
        **dict.fromkeys(("a_ptr", "b_ptr", "a_log_ptr", "bias_ptr", "g_ptr", "beta_ptr"), "*fp32"),
        **dict.fromkeys(("borders_ptr", "places_ptr", "tokens_ptr", "slots_ptr"), "*i64"),
        **dict.fromkeys(("qk_ptr", "v_ptr"), "*fp16"),
        **dict.fromkeys(("taps_ptr", "columns_ptr"), "*bf16"),
        "x_ptr": "*fp32",
    }
    done = ahead_of_time(kernels.front, {**shapes, **flags}, pointers, capability, launch.warps, enable_fp_fusion=False)
    used = usage(done)
    assert (used["STACK"], used["LOCAL"], used["SHARED"]) == (0, 0, 0)
    assert used["REG"] <= 168  # three programs a multiprocessor
    assert done.asm["ptx"].count("ld.global.v4.b32") >= 2 * launch.rows


def test_launches() -> None:
    assert span_launch(128) == SpanLaunch(rows=16, elements=512, warps=4)
    assert [span_launch(wide).elements for wide in (1, 64, 512, 1024)] == [512, 512, 512, 1024]


def test_what_is_refused() -> None:
    it = step(Shape(1, 2, 16, 16), WIDE, (3,), CPU, 0, torch.float32, gaps=False)
    turned = it.columns.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="columns"):
        prefill(it.inputs, it.net, turned, it.states, it.plan, torch.float32)
    wide = NetInputs(it.inputs.mixed[:, ::2], it.inputs.a, it.inputs.b)
    with pytest.raises(ValueError, match="inputs"):
        front(wide, it.net, it.columns, it.plan, torch.float32, unit=False)
    nothing = plan_recurrence([1], [0], CPU)
    with pytest.raises(ValueError, match="no spans"):
        prefill(it.inputs, it.net, it.columns, it.states, nothing, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnGpu:
    cuda = torch.device("cuda")

    @pytest.mark.parametrize(
        ("shape", "kinds", "x", "unit"),
        [
            *((LARGE, kinds, torch.float32, unit) for kinds in (WIDE, SERVED) for unit in (False, True)),
            (LARGE, SERVED, torch.bfloat16, True),
            (Shape(16, 32, 128, 128), Kinds(torch.float16, torch.bfloat16, torch.float32), torch.float16, True),
            (Shape(2, 4, 64, 64), SERVED, torch.float32, True),
            (Shape(2, 6, 12, 20), SERVED, torch.float32, True),
            (Shape(3, 6, 16, 8, width=2), WIDE, torch.float32, True),
        ],
    )
    def test_front(self, shape: Shape, kinds: Kinds, x: torch.dtype, unit: bool) -> None:
        """The 27B's shape, the 35B's, the small model's and odd ones."""
        check_front(step(shape, kinds, LENGTHS, self.cuda, 0, x, gaps=True), kinds.inner, unit)

    @pytest.mark.parametrize("launch", [None, SpanLaunch(4, 128, 1)])
    @pytest.mark.parametrize("kinds", [WIDE, SERVED])
    def test_rows(self, kinds: Kinds, launch: SpanLaunch | None) -> None:
        check_rows(step(LARGE, kinds, (1, 37, 3), self.cuda, 1, kinds.model, gaps=True), kinds.inner, launch)

    @pytest.mark.parametrize("unit", [False, True])
    def test_saturation(self, unit: bool) -> None:
        check_saturation(step(LARGE, WIDE, (2, 1), self.cuda, 2, torch.float32, gaps=True), unit)

    @pytest.mark.parametrize("state", [torch.float32, torch.float16])
    @pytest.mark.parametrize(("counts", "gaps"), [((513,), False), (LENGTHS, False), (LENGTHS, True)])
    def test_prefill(self, counts: tuple[int, ...], gaps: bool, state: torch.dtype) -> None:
        """By flash-linear-attention where it is installed: the 27B's shape in its dtypes."""
        kinds = Kinds(torch.bfloat16, torch.float16, state)
        check_prefill(step(LARGE, kinds, counts, self.cuda, 3, torch.float32, gaps), torch.float16, 1e-2)

    def test_prefill_in_float32(self) -> None:
        check_prefill(step(LARGE, WIDE, (70, 2), self.cuda, 4, torch.float32, gaps=True), torch.float32, 1e-4)

    def test_prefill_is_convolution_and_rule_apart(self) -> None:
        """With the norms in flash-linear-attention's hands, and tokens gathered."""
        it = step(LARGE, SERVED, LENGTHS, self.cuda, 5, torch.float32, gaps=True)
        columns, states, apart_states = it.columns.clone(), it.states.clone(), it.states.clone()
        o = prefill(it.inputs, it.net, columns, states, it.plan, torch.float16)
        rows = in_torch(it, it.columns.clone(), torch.float16, unit=False)
        flat = [x.new_zeros(len(o), *x.shape[1:]) for x in (rows.q, rows.k, rows.v, rows.g, rows.beta)]
        for to, x in zip(flat, (rows.q, rows.k, rows.v, rows.g, rows.beta), strict=True):
            to[it.packed.tokens] = x
        apart = gated_delta(flat[0], flat[1], flat[2], flat[3], flat[4], apart_states, it.plan)
        tokens, slots = it.packed.tokens, it.packed.slots
        assert relative(o[tokens], apart[tokens].double()) < 5e-3
        assert relative(states[slots], apart_states[slots].double()) < 5e-3

    def test_launches_that_overlap(self) -> None:
        """Steps behind each other in the same slots, of which each begins before the one before has ended."""
        steps = [step(LARGE, SERVED, (40, 2, 17), self.cuda, seed, torch.float32, gaps=True) for seed in range(8)]

        def run(wait: bool) -> list[Tensor]:
            columns = steps[0].columns.clone()
            outs = []
            for it in steps:
                rows = front(it.inputs, it.net, columns, steps[0].plan, torch.float16, True)
                outs += [rows.q, rows.k, rows.v, rows.g, rows.beta]
                if wait:
                    torch.cuda.synchronize()
            return [*outs, columns]

        for fast, slow in zip(run(wait=False), run(wait=True), strict=True):
            assert torch.equal(bits(fast), bits(slow))


def test_steps_hold_what_they_should() -> None:
    """Of the tests themselves: spans in order, gaps poisoned."""
    it: Step = step(Shape(1, 2, 16, 16), WIDE, (3, 1), CPU, 0, torch.float32, gaps=True)
    assert it.packed.tokens.tolist() == [2, 3, 4, 7]
    assert len(it.inputs.mixed) == 10
    assert it.inputs.mixed.isfinite().all(1).nonzero().flatten().tolist() == [2, 3, 4, 7]
    assert it.columns[it.packed.slots].isfinite().all()
