"""Codecs of all formats. Relative error (root of the sums of squares) of 256 x 2048 values, percent:

format      bits   normal   Student's t, 4 degrees of freedom
fp8         8.02   2.64     2.59
fp8-block   8.00   2.64     2.63
nvfp4       4.52   8.41     8.46
int8-g32    8.50   0.51     0.71
int6-g64    6.25   2.31     3.51
int5-g64    5.25   4.61     6.95
int4-g64    4.25   9.08     13.5
int3-g128   3.13   18.7     27.7
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.linear.quantized import E2M1, FORMATS, Quantized, dequantize
from services.engine.weights.codecs import encode
from services.engine.weights.codecs.fp8 import e4m3
from services.engine.weights.codecs.nvfp4 import e2m1

ERRORS = {
    "fp8": (2.66, 2.66),
    "fp8-block": (2.66, 2.66),
    "nvfp4": (8.5, 8.55),
    "int8-g32": (0.53, 0.74),
    "int6-g64": (2.35, 3.6),
    "int5-g64": (4.7, 7.2),
    "int4-g64": (9.2, 14.0),
    "int3-g128": (18.9, 28.5),
}
"""Percent, a little above the table."""
SHAPES = [(1, 1), (3, 16), (130, 150), (5, 257), (128, 256)]


def normal(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def heavy(rows: int, columns: int) -> Tensor:
    """Student's t with 4 degrees of freedom: normal / sqrt(chi^2 / 4)."""
    chi = sum(normal(rows, columns, seed).div(0.02).square() for seed in range(1, 5))
    return normal(rows, columns) / (torch.as_tensor(chi) / 4).sqrt()


def same(one: Quantized, other: Quantized) -> bool:
    """Bit for bit."""
    pairs = ((one.codes, other.codes), (one.scales, other.scales), (one.row_scale, other.row_scale))
    return all(
        (a is None and b is None)
        or (
            a is not None
            and b is not None
            and a.dtype == b.dtype
            and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        )
        for a, b in pairs
    )


def whole(quantized: Quantized) -> Tensor | None:
    """`largest` of the matrix that nvfp4 codes came from."""
    return quantized.row_scale * 2688 if quantized.format == "nvfp4" and quantized.row_scale is not None else None


@pytest.mark.parametrize("format", FORMATS)
def test_error(format: str) -> None:
    for values, limit in zip((normal(256, 2048), heavy(256, 2048)), ERRORS[format], strict=True):
        error = float((dequantize(encode(values, format)) - values).norm() / values.norm())
        assert 0.9 * limit < 100 * error < limit


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_come_back(format: str, shape: tuple[int, int]) -> None:
    quantized = encode(normal(*shape), format)
    again = encode(dequantize(quantized), format, largest=whole(quantized))
    assert torch.equal(dequantize(again), dequantize(quantized))
    assert same(again, quantized)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_may_be_encoded_in_pieces(format: str) -> None:
    values = normal(300, 200)
    all_rows = encode(values, format, largest=1.0)
    for first, last in ((0, 128), (128, 300)):
        piece = encode(values[first:last], format, largest=1.0)
        assert torch.equal(dequantize(piece), dequantize(all_rows)[first:last])


@pytest.mark.parametrize("format", [name for name, form in FORMATS.items() if form.integer])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_foreign_integers_come_back(format: str, kind: torch.dtype) -> None:
    """Any codes and scales, where each group reaches the end of the range that its scale gives."""
    form = FORMATS[format]
    generator = torch.Generator().manual_seed(1)
    top = 2 ** (form.bits - 1) - 1
    codes = torch.randint(-top, top + 1, (9, 3 * form.group), generator=generator).to(torch.int8)
    codes[:, :: form.group] = top
    codes[:, 1 :: form.group] = -top + 1  # no factor in common
    scales = (torch.rand(9, 3, generator=generator) + 0.1).to(kind)
    quantized = Quantized(format, codes, scales)
    assert same(encode(dequantize(quantized), format, kind), quantized)
    # The most negative code has no positive counterpart, so neither its sign nor its scale is in doubt.
    codes[:, :: form.group] = -top - 1
    codes[:, 1 :: form.group] = -top
    quantized = Quantized(format, codes, -scales)
    assert same(encode(dequantize(quantized), format, kind), quantized)


def test_foreign_nvfp4_comes_back() -> None:
    """Scales over all of e4m3, subnormals too; a 6 in each group."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(2, 63).view(torch.float8_e4m3fn)
    codes = torch.arange(2 * 63 * 16).view(2, -1).remainder(16).to(torch.uint8)  # each group has all of them
    row_scale = torch.tensor([2.0**-11, 3 * 2.0**-9])
    quantized = Quantized("nvfp4", codes, scales, row_scale)
    assert same(encode(dequantize(quantized), "nvfp4", largest=row_scale * 2688), quantized)


def test_e4m3_rounds_to_nearest_even_and_saturates() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    values = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(e4m3(values), codes)  # -0 as well
    below, above = values[:126], values[1:127]
    middle = (below + above) / 2
    even = torch.where(codes[:126] % 2 == 0, codes[:126], codes[1:127])
    assert torch.equal(e4m3(middle), even)
    assert torch.equal(e4m3(-middle), even | 0x80)
    assert torch.equal(e4m3(middle * 1.001), codes[1:127])
    assert e4m3(torch.tensor([449.0, 464.0, 1e30, -1e30])).tolist() == [0x7E, 0x7E, 0x7E, 0xFE]


def test_e2m1_rounds_to_nearest_even_and_saturates() -> None:
    values = torch.tensor(E2M1)
    assert e2m1(values).tolist() == list(range(16))
    middle = (values[:7] + values[1:8]) / 2
    assert e2m1(middle).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert e2m1(middle - 0.01).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert e2m1(-middle - 0.01).tolist() == [9, 10, 11, 12, 13, 14, 15]
    assert e2m1(torch.tensor([6.1, 1e30, -1e30, 0.1, -0.1])).tolist() == [7, 7, 15, 0, 8]


@given(st.floats(-8, 8, width=32))
def test_e2m1_is_nearest(value: float) -> None:
    found = E2M1[int(e2m1(torch.tensor([value])))]
    assert abs(found - value) == min(abs(other - value) for other in E2M1)


def test_vectors_of_nvfp4() -> None:
    """A group whose values are codes keeps them; the tensor's scale is largest / 2688, that of the group 448."""
    values = torch.tensor([[0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0]]) * 7
    quantized = encode(values, "nvfp4")
    assert quantized.codes.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 0]]
    assert quantized.row_scale is not None
    assert quantized.scales is not None
    assert quantized.row_scale.tolist() == [0.015625]
    assert quantized.scales.float().tolist() == [[448.0]]


def test_vectors_of_integers() -> None:
    """Of compressed-tensors' own codes: -4..3 repeated, and 4 bits of all kinds."""
    three = torch.arange(-4, 4).repeat(16)[None].float() * 0.25
    quantized = encode(three, "int3-g128")
    assert quantized.codes.tolist() == [list(range(-4, 4)) * 16]
    assert quantized.scales is not None
    assert quantized.scales.tolist() == [[0.25]]
    four = torch.tensor([[-8.0, -7, -1, 0, 1, 2, 6, 7]]) * 3
    assert encode(four, "int4-g64").codes.tolist() == [[-8, -7, -1, 0, 1, 2, 6, 7]]
    # The range's odd end serves the larger side.
    assert encode(-four, "int4-g64").codes.tolist() == [[-8, -7, -1, 0, 1, 2, 6, 7]]


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_and_tiny_and_huge_values(format: str) -> None:
    zeros = encode(torch.zeros(2, 256), format)
    assert not dequantize(zeros).any()
    tiny = torch.full((2, 256), 1e-40)
    assert dequantize(encode(tiny, format)).abs().max() <= 2e-40
    huge = torch.full((2, 256), 1e38)
    torch.testing.assert_close(dequantize(encode(huge, format)), huge, rtol=0.01, atol=0)
    mixed = torch.zeros(2, 256)
    mixed[:, 7] = -3.0
    torch.testing.assert_close(dequantize(encode(mixed, format)), mixed, rtol=0.01, atol=0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite(format: str, bad: float) -> None:
    values = torch.zeros(2, 64)
    values[1, 5] = bad
    with pytest.raises(ValueError, match="not finite"):
        encode(values, format)


def test_what_cannot_be_encoded() -> None:
    with pytest.raises(ValueError, match="format 'fp4' is unknown; known: fp8, "):
        encode(torch.zeros(1, 16), "fp4")
    with pytest.raises(ValueError, match=r"values up to 1e\+06 are too large for scales in torch\.float16"):
        encode(torch.full((1, 64), 1e6), "int4-g64", torch.float16)
    assert encode(torch.full((1, 64), 1e6), "int4-g64", torch.bfloat16).scales is not None


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.integers(1, 5),
    st.integers(1, 150),
    st.integers(0, 2**31),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e20]),
)
def test_values_come_back(format: str, rows: int, columns: int, seed: int, size: float) -> None:
    """Whatever was encoded once is exact from then on."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * size
    values[:, ::3] = 0
    quantized = encode(values, format)
    once = dequantize(quantized)
    twice = dequantize(encode(once, format, largest=whole(quantized)))
    assert torch.equal(twice, once)
    step = once.abs().max() * (1 if format in ("int3-g128", "int4-g64", "nvfp4") else 0.2)
    assert bool(((once - values).abs() <= step + 1e-35).all())
