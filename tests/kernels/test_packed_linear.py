"""Packed weights: how they lie, and the products with them."""

import pytest
import torch
from torch import Tensor

from kernels.linear import linear, swiglu
from kernels.linear import triton as kernels
from kernels.linear.expand import expand
from kernels.linear.launch import STREAM_ROWS, stream_launch
from kernels.linear.packing import FP8, unit_columns
from kernels.linear.quantized import FORMATS, Quantized, dequantize
from kernels.linear.weight import Weight, pack, stack, unpack
from tests.devices import DEVICES
from tests.kernels.compiled import SHARED_LIMIT, resources, run_interpreted
from tests.kernels.packed_matrices import random_quantized

SHAPES = [(5, 64), (33, 576), (130, 1000), (256, 256)]
REAL_SHAPES = [(34816, 5120), (5120, 17408), (14336, 5120), (16384, 5120), (5120, 6144), (248320, 5120)]


def equal(one: Quantized, other: Quantized) -> bool:
    pairs = [(one.codes, other.codes), (one.scales, other.scales), (one.row_scale, other.row_scale)]
    return all(
        (a is None and b is None)
        or (a is not None and b is not None and torch.equal(a.view(torch.uint8), b.view(torch.uint8)))
        for a, b in pairs
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
def test_pack_and_unpack(format: str, device: torch.device) -> None:
    for rows, columns in SHAPES:
        quantized = random_quantized(format, rows, columns, str(device), seed=rows)
        weight = pack(quantized)
        assert equal(unpack(weight), quantized), (rows, columns)
        assert all(tensor.is_contiguous() for tensor in weight.tensors().values())
        assert weight.codes.nbytes * 8 == FORMATS[format].bits * rows * (columns + -columns % unit_columns(format))


@pytest.mark.parametrize("format", FORMATS)
def test_stack(format: str) -> None:
    above, below = (random_quantized(format, rows, 320, seed=rows) for rows in (128, 7))
    whole = stack([pack(above), pack(below)])
    assert torch.equal(dequantize(unpack(whole)), torch.cat((dequantize(above), dequantize(below))))
    assert Weight(whole.format, whole.rows, whole.columns, **whole.tensors()) == whole


def test_stack_refuses_what_does_not_fit() -> None:
    first = pack(random_quantized("int4-g64", 4, 128))
    with pytest.raises(ValueError, match="cannot stack"):
        stack([first, pack(random_quantized("int4-g64", 4, 256))])
    cut = pack(random_quantized("fp8-block", 100, 128))
    with pytest.raises(ValueError, match="cannot stack"):
        stack([cut, cut])


def test_zero_scales_of_nvfp4_take_their_codes_along() -> None:
    """The values stay; the codes under a zero scale mean nothing."""
    quantized = random_quantized("nvfp4", 3, 64)
    scales = quantized.scales
    assert scales is not None
    scales.view(torch.uint8)[1, 2] = 0
    quantized.codes[1, 32:48] = 5
    back = unpack(pack(quantized))
    assert torch.equal(dequantize(back), dequantize(quantized))
    assert not back.codes[1, 32:48].any()


def test_places_of_int3() -> None:
    """As the docstring of `packing` has it: pair 6 (the second of the second plane), word 3, upper half."""
    codes = torch.zeros(1, 256, dtype=torch.int8)
    codes[0, 6 * 16 + 2 * 3 + 1] = 1
    words = pack(Quantized("int3-g128", codes, torch.ones(1, 2, dtype=torch.bfloat16))).codes
    zero = pack(Quantized("int3-g128", codes * 0, torch.ones(1, 2, dtype=torch.bfloat16))).codes
    changed = (words ^ zero).nonzero().tolist()
    assert changed == [[0, 1, 0, 3]]
    assert int(words[0, 1, 0, 3] ^ zero[0, 1, 0, 3]) == (4 ^ 5) << (16 + 1)


@pytest.mark.parametrize("format", FORMATS)
def test_reference(format: str) -> None:
    quantized = random_quantized(format, 48, 200)
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(1))
    bias = torch.randn(48)
    expected = x.double() @ dequantize(quantized).double().t()
    got = linear(x, pack(quantized), bias)
    torch.testing.assert_close(got.double(), expected + bias, rtol=1e-5, atol=1e-3)
    gate, up = expected.chunk(2, dim=-1)
    assert_near(swiglu(x, pack(quantized)), gate * gate.sigmoid() * up, 1e-5)
    residual = torch.randn(3, 48)
    torch.testing.assert_close(
        linear(x, pack(quantized), residual=residual).double(), expected + residual, rtol=1e-5, atol=1e-3
    )


def test_interpreted() -> None:
    """Every format, odd shapes, poisoned outputs; see `interpreted_linear`."""
    run_interpreted("tests.kernels.interpreted_linear")


@pytest.mark.parametrize("capability", [80, 89, 90, 120])
@pytest.mark.parametrize("format", ["nvfp4", "fp8", "int4-g64", "int3-g128"])
def test_compiled_ahead_of_time(format: str, capability: int) -> None:
    """The launch of a decode step: no registers are spilled, and shared memory fits everywhere."""
    launch = stream_launch(format, 5120, 17408, unit_columns(format), 1, 128, divmod(capability, 10))
    constants = {
        "FORMAT": format,
        "UNIT": unit_columns(format),
        "BN": launch.rows,
        "BM": 8,
        "SLICES": launch.slices,
        "UNITS": launch.units,
        "SPLIT": True,
        "STAGES": launch.stages,
        "HALF": False,
        "EVEN": True,
        "SWIGLU": False,
        "RESIDUAL": True,
        "ASM": True,
        "PDL": capability >= 90,
    }
    pointers = {
        **dict.fromkeys(("x_ptr", "out_ptr", "residual_ptr"), "*bf16"),
        **dict.fromkeys(("codes_ptr", "scales_ptr", "arrived_ptr"), "*i32"),
        **dict.fromkeys(("row_scale_ptr", "partial_ptr"), "*fp32"),
    }
    used = resources(kernels.stream, constants, pointers, capability, launch.warps)
    assert (used["STACK"], used["LOCAL"]) == (0, 0)
    assert used["SHARED"] <= SHARED_LIMIT


def test_launches() -> None:
    """Splits fill the GPU, and none is shorter than the loads that it has in flight."""
    wide = stream_launch("nvfp4", 34816, 5120, 64, 16, 132, (9, 0))
    assert (wide.rows, wide.splits) == (64, 1)
    assert stream_launch("nvfp4", 34816, 5120, 64, 8, 132, (9, 0)).splits == 2  # measured
    assert [stream_launch("int3-g128", 5120, 17408, 128, batch, 132, (9, 0)).rows for batch in (1, 2, 8, 9)] == [
        32,
        64,  # measured
        64,
        64,
    ]
    deep = stream_launch("nvfp4", 5120, 17408, 64, 1, 132, (9, 0))
    assert deep.splits == 6
    assert not deep.pdl
    assert stream_launch("int3-g128", 64, 256, 256, 1, 132, (9, 0)).splits == 1
    assert stream_launch("fp8", 34816, 5120, 128, 1, 132, (8, 9)).pdl is False


def assert_near(got: Tensor, expected: Tensor, bound: float) -> None:
    """By the relative error of the whole; NaN fails."""
    error = float((got.double() - expected.double()).norm() / expected.double().norm())
    assert error < bound, error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnGpu:
    """Against float64 at the 27B's shapes and at odd ones."""

    @pytest.mark.parametrize("shape", REAL_SHAPES)
    @pytest.mark.parametrize("format", FORMATS)
    def test_real_shapes(self, format: str, shape: tuple[int, int]) -> None:
        rows, columns = shape
        if rows > 100_000:
            rows = 8192  # of the head; all of its rows are as these
        quantized = random_quantized(format, rows, columns, "cuda")
        weight = pack(quantized)
        exact = dequantize(quantized)
        plain = torch.full_like(exact, torch.nan)
        expand(weight, 0, rows, plain)
        assert torch.equal(plain, exact)
        for count in (1, 8, 16, 64, 300):
            x = torch.randn(count, columns, device="cuda").to(torch.bfloat16)
            expected = x.double() @ exact.double().t()
            residual = torch.randn(count, rows, device="cuda")
            got = linear(x, weight, residual=residual)
            assert torch.equal(got, linear(x, weight, residual=residual))
            if count <= STREAM_ROWS:
                assert_near(got, expected + residual, 1e-5)
            else:  # bfloat16 weights and products, or x in FP8
                assert_near(got - residual, expected, 3e-2 if format == "fp8" else 5e-3)
            gate, up = expected.chunk(2, dim=-1)
            bound = 4e-3 if count <= STREAM_ROWS else (6e-2 if format == "fp8" else 1e-2)
            assert_near(swiglu(x, weight), gate * gate.sigmoid() * up, bound)

    @pytest.mark.parametrize("format", FORMATS)
    def test_odd_shapes(self, format: str) -> None:
        for rows, columns in SHAPES:
            quantized = random_quantized(format, rows, columns, "cuda", seed=columns, scale_dtype=torch.float16)
            weight = pack(quantized)
            for count in (1, 3, 16, 33, 100):
                wide = torch.randn(count, columns + 24, device="cuda").to(torch.bfloat16)
                x = wide[:, 16 : 16 + columns]  # rows with a stride
                expected = x.double() @ dequantize(quantized).double().t()
                assert_near(linear(x, weight), expected, 3e-2 if format in FP8 and count > STREAM_ROWS else 5e-3)
        assert linear(x[:0], weight).shape == (0, rows)

    def test_kernels_that_follow_each_other(self) -> None:
        """One begins while the one before still runs, and must see its result."""
        weights = [pack(random_quantized("fp8", 16384, 16384, "cuda", seed=seed)) for seed in range(2)]
        x = torch.randn(2, 16384, device="cuda").to(torch.bfloat16)

        def chain(wait: bool) -> Tensor:
            y = x
            for step in range(40):
                y = linear(y * (2 / y.float().norm()).to(y.dtype) if step % 5 == 0 else y, weights[step % 2])
                if wait:
                    torch.cuda.synchronize()
            return y

        assert torch.equal(chain(wait=False), chain(wait=True))
