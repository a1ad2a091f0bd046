"""The kernels between the products: in the interpreter, compiled for other GPUs, on a GPU at real shapes."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.elementwise import add, sigmoid_gated, silu_gated
from kernels.elementwise import launches as elementwise
from kernels.elementwise import triton as elementwise_kernels
from kernels.embedding import embed
from kernels.embedding import triton as embedding_kernels
from kernels.linear import few_rows_triton, linear, swiglu
from kernels.linear.few_rows import COLUMNS, OUTPUTS, ROWS, few_rows, fits
from kernels.linear.packing import unit_columns
from kernels.linear.quantized import FORMATS, dequantize
from kernels.linear.weight import pack
from kernels.norm_rope import launches as norm_rope
from kernels.norm_rope import reference as norm_rope_reference
from kernels.norm_rope import rms_norm_centred, rms_norm_gated, rotary_angles
from kernels.norm_rope import triton as norm_rope_kernels
from kernels.overlap import overlap, overlaps
from kernels.vectors import VectorLaunch, vector_launch, vectors
from tests.devices import DEVICES
from tests.kernels.compiled import SHARED_LIMIT, resources, run_interpreted
from tests.kernels.packed_matrices import random_quantized
from tests.kernels.small_kernels import (
    Draw,
    check_angles,
    check_few_rows,
    check_gates,
    check_norms,
    check_take,
    near,
)

BRAIN, HALF, FULL = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("device", DEVICES)
def test_gates_and_sums(device: torch.device) -> None:
    """Beside their definitions in float64."""
    draw = Draw(1, device)
    x, gate, both = draw(3, 2, 20, name=1), draw(3, 2, 20, name=2), draw(3, 40, name=3)
    torch.testing.assert_close(sigmoid_gated(x, gate).double(), x.double() / (1 + (-gate.double()).exp()))
    first, second = both.double().chunk(2, dim=-1)
    torch.testing.assert_close(silu_gated(both).double(), first / (1 + (-first).exp()) * second)
    total = add(both, both.bfloat16())
    assert total.dtype == FULL
    torch.testing.assert_close(total.double(), both.double() + both.bfloat16().double())
    assert sigmoid_gated(x.bfloat16(), gate).dtype == BRAIN
    assert silu_gated(both[:0]).shape == (0, 20)


def test_vectors_lie_where_they_say() -> None:
    whole = torch.arange(240.0).view(4, 3, 20)
    for x in (
        whole,
        whole[1:, :2, 3:11],
        whole[:, 0],
        whole.transpose(0, 1),
        whole[0, 0],
        whole.transpose(1, 2),
        whole.view(2, 2, 3, 20)[:, :, 1:],
        torch.ones(3, 1).expand(3, 5),
    ):
        found = vectors(x)
        start = found.tensor.storage_offset()
        flat = torch.as_strided(found.tensor, (found.tensor.untyped_storage().nbytes() // 4,), (1,), 0)
        for n, expected in enumerate(x.reshape(-1, x.shape[-1])):
            first = start + n // found.heads * found.token_stride + n % found.heads * found.head_stride
            assert torch.equal(flat[first : first + found.size], expected)
        assert found.count == x.numel() // x.shape[-1]


def test_launches() -> None:
    """A warp a head of 128 dims where there are few, more vectors a program where there are many; as many warps as it
    takes to have a long one in flight."""
    assert vector_launch(48, 128) == VectorLaunch(4, 128, 4)
    assert vector_launch(48 * 8192, 128) == VectorLaunch(16, 128, 4)
    assert vector_launch(24, 256) == VectorLaunch(2, 256, 4)
    assert vector_launch(1, 5120) == VectorLaunch(1, 8192, 16)
    assert vector_launch(8192, 5120) == VectorLaunch(1, 8192, 8)
    assert vector_launch(1, 1) == VectorLaunch(32, 16, 4)


def test_only_a_gpu_that_can_overlaps() -> None:
    cpu = torch.device("cpu")
    assert not overlaps(cpu)
    assert overlap(cpu, None) == overlap(cpu, True) == overlap(torch.device("cuda"), False) == {"PDL": False}
    assert overlap(torch.device("cuda"), True) == {"PDL": True, "launch_pdl": True}


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.ones(2, 6), torch.ones(6)
    with pytest.raises(ValueError, match="with weights"):
        norm_rope.norm("plain", x, None, weight[:5], 1e-6, FULL)
    with pytest.raises(ValueError, match="gated norm"):
        norm_rope.norm("gated", x, None, weight, 1e-6, FULL)
    with pytest.raises(ValueError, match="gate"):
        norm_rope.norm("gated", x, x[:1], weight, 1e-6, FULL)
    with pytest.raises(ValueError, match="gate"):
        elementwise.sigmoid_gated(x, x[:, :3])
    with pytest.raises(ValueError, match="5 columns"):
        elementwise.silu_gated(x[:, :5])
    with pytest.raises(ValueError, match="residual"):
        elementwise.add(x, x[:1])
    for rows, outputs, columns, small in (
        (ROWS, OUTPUTS, COLUMNS, True),
        (0, 1, 1, False),
        (ROWS + 1, 1, 1, False),
        (1, OUTPUTS + 1, 1, False),
        (1, 1, COLUMNS + 1, False),
    ):
        assert fits(*(torch.empty(size, columns, dtype=BRAIN) for size in (rows, outputs))) == small
    assert not fits(torch.empty(ROWS, 1), torch.empty(1, 1))
    assert not fits(torch.empty(4, 3).t(), torch.empty(2, 4))


def test_interpreted() -> None:
    """Odd sizes, views with NaN around them, new tensors that are NaN before; see `interpreted_small_kernels`."""
    run_interpreted("tests.kernels.interpreted_small_kernels")


@pytest.mark.parametrize("capability", [80, 89, 90, 120])
def test_compiled_ahead_of_time(capability: int) -> None:
    """At the 27B's shapes, of few and of many rows: no registers are spilled."""
    for label, used in _resources(capability):
        assert (used["STACK"], used["LOCAL"]) == (0, 0), label
        assert used["SHARED"] <= SHARED_LIMIT, label


def _resources(capability: int) -> Iterator[tuple[str, dict[str, int]]]:
    pdl = {"PDL": capability >= 90}
    for x, kind, heads, size, counts in (
        ("*fp32", "centred", 1, 5120, (1, 8192)),
        ("*fp16", "gated", 48, 128, (48, 48 * 8192)),
    ):
        for count in counts:
            launch = vector_launch(count, size)
            shape = {"HEADS": heads, "N": size, "WIDE": launch.wide, "COUNT": launch.count, "KIND": kind}
            pointers = {"x_ptr": x, "gate_ptr": "*fp32", "weight_ptr": "*bf16", "out_ptr": "*bf16", "eps": "fp32"}
            used = resources(norm_rope_kernels.norm, {**shape, **pdl}, pointers, capability, launch.warps)
            yield f"{kind} {count}", used
    numbers = {"frequencies_ptr": "*fp32", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "positions_ptr": "*i64"}
    yield "angles", resources(norm_rope_kernels.angles, {"PAIRS": 32, "BLOCK": 256, **pdl}, numbers, capability, 4)
    halves = dict.fromkeys(("x_ptr", "gate_ptr", "gate_up_ptr", "out_ptr", "weight_ptr", "bias_ptr"), "*bf16")
    for count in (24, 24 * 8192):
        launch = vector_launch(count, 256)
        shape = {"HEADS": 24, "N": 256, "WIDE": launch.wide, "COUNT": launch.count}
        used = resources(elementwise_kernels.sigmoid_gated, {**shape, **pdl}, halves, capability, launch.warps)
        yield f"sigmoid {count}", used
    yield "silu", resources(elementwise_kernels.silu_gated, {"BLOCK": 1024, **pdl}, halves, capability, 4)
    wide = {**halves, "residual_ptr": "*fp32", "out_ptr": "*fp32"}
    yield "add", resources(elementwise_kernels.add, {"BLOCK": 1024, **pdl}, wide, capability, 8)
    plain = {"K": 5120, "BIAS": False, "RESIDUAL": False, **pdl}
    for at_once in (1, 4):
        shape = {"BK": 1024, "BM": at_once}
        yield f"few {at_once}", resources(few_rows_triton.by_row, {**plain, **shape}, wide, capability, 4)
    tile = {"BK": 64, "BM": 8, "BN": 16, "SLICES": 8, "STAGES": 4, "HALF": True}
    yield "tiles", resources(few_rows_triton.by_tile, {**plain, **tile}, wide, capability, 8)
    table = {"rows_ptr": "*i64", "codes_ptr": "*i32", "scales_ptr": "*i32", "row_scale_ptr": "*fp32"}
    for format in ("fp8", "nvfp4", "int4-g64"):
        for at_once in (1, 4):
            units = 1 if format == "fp8" else 4
            shape = {"FORMAT": format, "UNIT": unit_columns(format), "COUNT": at_once, "UNITS": units, "HALF": False}
            constants = {**shape, "ASM": True, **pdl}
            used = resources(embedding_kernels.take, constants, {**table, "out_ptr": "*bf16"}, capability, at_once)
            yield f"{format} {at_once}", used


gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CUDA = torch.device("cuda")


def _ways() -> tuple[bool, ...]:
    return (False, True) if overlaps(CUDA) else (False,)


@gpu
@needs_gpu
@pytest.mark.parametrize("tokens", [1, 2, 8, 63, 8192])
def test_norms_and_gates_on_a_gpu(tokens: int) -> None:
    """The 27B's hidden vectors, value heads and query heads."""
    draw = Draw(tokens, CUDA)
    for pdl in _ways():
        for shape in ((tokens, 5120), (tokens, 48, 128), (tokens, 24, 256)):
            for kinds in ((FULL, BRAIN, BRAIN), (HALF, BRAIN, BRAIN), (HALF, FULL, FULL), (BRAIN, BRAIN, BRAIN)):
                check_norms(draw, shape, kinds, pdl)
            check_gates(draw, shape, BRAIN, pdl)
        check_gates(draw, (min(tokens, 63), 17408), BRAIN, pdl)


@gpu
@needs_gpu
def test_angles_on_a_gpu() -> None:
    frequencies = (1.0 / (1e7 ** (torch.arange(0, 64, 2).float() / 64))).cuda()
    for pdl in _ways():
        for positions in (torch.tensor([0]), torch.arange(262_144 - 8192, 262_145), torch.randint(0, 2**18, (63,))):
            check_angles(positions.cuda(), frequencies, pdl)
    positions = torch.arange(0, 262_144, 37, device="cuda")
    expected = norm_rope_reference.rotary_angles(positions, frequencies)
    for got, value in zip(rotary_angles(positions, frequencies), expected, strict=True):
        assert float((got - value).abs().max()) <= 2**-22


@gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 17, 64])
def test_few_rows_on_a_gpu(rows: int) -> None:
    for pdl in _ways():
        for outputs, columns in ((96, 5120), (1, 2048), (33, 1000)):
            for dtype in (BRAIN, FULL):
                check_few_rows(Draw(rows, CUDA), rows, outputs, columns, dtype, pdl)


@gpu
@needs_gpu
@pytest.mark.parametrize("format", FORMATS)
def test_take_on_a_gpu(format: str) -> None:
    for pdl in _ways():
        for columns, scale_dtype in ((5120, BRAIN), (200, HALF)):
            for dtype in (FULL, BRAIN):
                check_take(format, 300, columns, scale_dtype, CUDA, dtype, pdl)


@gpu
@needs_gpu
@pytest.mark.parametrize("format", ["fp8", "nvfp4", "int4-g64"])
@pytest.mark.parametrize("rows", [3, 130])
def test_a_wide_result_of_packed_weights(format: str, rows: int) -> None:
    """Of few rows it is that of the sums, not of their rounding to half precision."""
    quantized = random_quantized(format, 256, 512, device="cuda")
    weight, draw = pack(quantized), Draw(rows, CUDA)
    x, residual = draw(rows, 512, dtype=BRAIN, name=1), draw(rows, 256, name=2)
    exact = x.double() @ dequantize(quantized).double().t()
    size = float(exact.abs().max())
    bound = 5e-5 if rows == 3 else 0.08 if format == "fp8" else 0.01
    found = linear(x, weight, dtype=FULL)
    assert found.dtype == FULL
    assert float((found - exact).abs().max()) < bound * size
    added = linear(x, weight, residual=residual)
    assert added.dtype == FULL
    assert float((added - exact - residual).abs().max()) < bound * size
    gate, up = exact.chunk(2, dim=-1)
    gated = swiglu(x, weight)
    assert gated.dtype == BRAIN
    expected = gate * gate.sigmoid() * up
    assert float((gated - expected).norm() / expected.norm()) < 0.1


@gpu
@needs_gpu
def test_one_captured_step_serves_other_numbers() -> None:
    """All of them behind each other, each reading what the one before has just written, in a graph that is replayed
    with other positions, tokens and values."""
    rows, width = 4, 256
    quantized = random_quantized("nvfp4", 50, width)
    table, exact = pack(quantized).to(CUDA), dequantize(quantized)
    tokens, positions = torch.zeros(2, rows, dtype=torch.int64, device=CUDA)
    weight, matrix = Draw(1, CUDA)(width, scale=1), Draw(2, CUDA)(96, width, scale=0.1)
    frequencies = 1.0 / 1e7 ** (torch.arange(32, device=CUDA) / 32)
    torch.cuda.synchronize()

    def run() -> tuple[Tensor, ...]:
        x = embed(tokens, table, FULL)
        cos, sin = rotary_angles(positions, frequencies)
        x = rms_norm_centred(x, weight, 1e-6)
        x = rms_norm_gated(sigmoid_gated(x, x), x, weight, 1e-6)
        x = add(x, x)
        return cos, sin, linear(silu_gated(torch.cat((x, x), dim=-1)), matrix)

    def expected() -> tuple[Tensor, ...]:
        x = exact[tokens.cpu()].to(CUDA)
        cos, sin = norm_rope_reference.rotary_angles(positions, frequencies)
        x = norm_rope_reference.rms_norm_centred(x, weight, 1e-6, FULL)
        x = norm_rope_reference.rms_norm_gated(x * x.sigmoid(), x, weight, 1e-6, FULL)
        x = 2 * x
        return cos, sin, (x * x.sigmoid() * x).double() @ matrix.double().t()

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for number in range(1, 4):
        tokens.copy_(torch.arange(rows) * number + 3)
        positions.copy_(torch.arange(rows) * 60_000 + number)
        graph.replay()
        for got, value in zip(found, expected(), strict=True):
            near(got, value, 1e-3)


@gpu
@needs_gpu
def test_nothing_waits_for_the_gpu() -> None:
    """`torch.cuda.set_sync_debug_mode` raises where one would."""
    table = pack(random_quantized("fp8", 50, 256)).to(CUDA)
    tokens, x = torch.arange(3, device=CUDA), torch.ones(3, 256, device=CUDA, dtype=BRAIN)
    matrix = torch.ones(96, 256, device=CUDA, dtype=BRAIN)

    def run() -> None:
        embed(tokens, table, BRAIN)
        rotary_angles(tokens, x[0].float())
        rms_norm_centred(x, x[0], 1e-6)
        few_rows(x, matrix, None, None, FULL)
        linear(x, table, dtype=FULL)
        swiglu(x, table)

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
