"""Matrices quantized in groups: forms, and products by the reference."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from kernels.linear.grouped import decode, launch, linear, planes
from kernels.linear.grouped.form import BITS, Grouped, Layout, dequantize
from kernels.linear.grouped.weight import GroupedWeight, pack, stack, unpack
from tests.devices import DEVICES
from tests.kernels.grouped_matrices import LAYOUTS, random_grouped


def assert_equal(one: object, other: object) -> None:
    """Dataclasses of tensors, bit for bit."""
    for field in fields(type(one)):  # type: ignore[arg-type]
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), field.name
        else:
            assert a == b, field.name


def by_hand(grouped: Grouped) -> Tensor:
    """float64, one value at a time."""
    layout = grouped.layout
    out = torch.empty(grouped.codes.shape, dtype=torch.float64)
    for n in range(grouped.rows):
        for k in range(grouped.columns):
            code = int(grouped.codes[n, k])
            value = layout.table[code] if layout.table else code - layout.zero
            scale = float(grouped.scales[n, k // layout.span])
            if grouped.sub_scales is not None:
                scale *= int(grouped.sub_scales[n, k // layout.group])
            least = 0.0
            if grouped.mins is not None:
                least = float(grouped.mins[n, k // layout.span])
                if grouped.sub_mins is not None:
                    least *= int(grouped.sub_mins[n, k // layout.group])
            out[n, k] = value * scale - least
    return out


@pytest.mark.parametrize("name", ["4 bits, mins in super-blocks", "3 bits, columns end in a group", "table of 2"])
def test_dequantize(name: str) -> None:
    grouped = random_grouped(name)
    torch.testing.assert_close(dequantize(grouped).double(), by_hand(grouped), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_pack_and_unpack(name: str) -> None:
    grouped = random_grouped(name)
    packed = pack(grouped)
    assert_equal(unpack(packed), grouped)
    assert_equal(GroupedWeight(packed.layout, packed.rows, packed.columns, **packed.tensors()), packed)
    assert all(tensor.is_contiguous() for tensor in packed.tensors().values())


@pytest.mark.parametrize("bits", BITS)
def test_places_of_bits(bits: int) -> None:
    """As the docstring of `planes` has it."""
    codes = torch.randint(0, 2**bits, (3, 140), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    packed = planes.pack(codes, bits)
    assert packed.shape == (2, 3, 4 * bits)
    for column in (0, 1, 15, 16, 17, 100, 127, 128, 139):
        place, lane = divmod(column % 128, 16)
        code, first, low = 0, 0, 0
        for plane in planes.PLANES[bits]:
            shared = 4 // plane
            word = int(packed[column // 128, 2, first + lane // shared]) & 0xFFFFFFFF
            code |= (word >> (plane * (8 * (lane % shared) + place)) & (2**plane - 1)) << low
            first, low = first + 4 * plane, low + plane
        assert code == int(codes[2, column])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_linear(name: str, device: torch.device) -> None:
    """Few rows and many, against float64. On a GPU x is bfloat16, and above FEW_ROWS the weights are rounded too."""
    grouped = random_grouped(name)
    weight = pack(grouped).to(device)
    exact = dequantize(grouped).double()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(1)
    for count in (0, 1, 5, 17, launch.FEW_ROWS, launch.FEW_ROWS + 1):
        x = torch.randn(count, grouped.columns, generator=generator).to(dtype)
        bias = torch.randn(grouped.rows, generator=generator).to(dtype) if count % 2 else None
        out = linear(x.to(device), weight, None if bias is None else bias.to(device))
        assert out.dtype == dtype
        assert out.is_contiguous()
        expected = x.double() @ exact.t() + (0 if bias is None else bias.double())
        size = (x.double().abs() @ exact.abs().t()).clamp(min=1e-3)
        error = ((out.cpu().double() - expected).abs() / (size + expected.abs())).max() if count else torch.tensor(0)
        assert float(error) < (1e-6 if dtype == torch.float32 else 4e-3)
        again = linear(x.to(device), weight, None if bias is None else bias.to(device))
        assert torch.equal(out, again)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_decode_of_rows_and_of_a_range(name: str, device: torch.device) -> None:
    grouped = random_grouped(name)
    weight = pack(grouped).to(device)
    exact = dequantize(grouped)
    # A GPU may subtract the min in the same step as it multiplies, and so round once less.
    near = {"rtol": 0, "atol": 0 if device.type == "cpu" else 1e-6 * float(exact.abs().max())}
    torch.testing.assert_close(decode(weight, torch.float32).cpu(), exact, **near)
    torch.testing.assert_close(decode(weight, torch.bfloat16).float().cpu(), exact, rtol=2**-8, atol=near["atol"])
    ids = torch.tensor([2, 0, 2])
    torch.testing.assert_close(decode(weight.take(ids.to(device)), torch.float32).cpu(), exact[ids], **near)
    part = weight.narrow(1, 2)
    assert part.codes.data_ptr() != weight.codes.data_ptr()
    torch.testing.assert_close(decode(part, torch.float32).cpu(), exact[1:3], **near)
    x = torch.randn(3, grouped.columns, generator=torch.Generator().manual_seed(3))
    size = float((x.abs() @ exact.abs().t()).max())
    expected = (x.double() @ exact[1:3].double().t()).float()
    torch.testing.assert_close(linear(x.to(device), part).cpu(), expected, rtol=0, atol=1e-6 * size)


def test_stack() -> None:
    parts = [random_grouped("5 bits, last super-block cut", seed) for seed in range(3)]
    whole = stack([pack(part) for part in parts])
    assert whole.rows == 3 * 5
    assert torch.equal(decode(whole, torch.float32), torch.cat([dequantize(part) for part in parts]))
    assert_equal(whole.narrow(5, 5).take(torch.arange(5)), pack(parts[1]))
    for other in (random_grouped("4 bits"), random_grouped("5 bits, last super-block cut", dtype=torch.float32)):
        with pytest.raises(ValueError, match="cannot stack"):
            stack([pack(parts[0]), pack(other)])


def test_rows_out_of_range() -> None:
    with pytest.raises(ValueError, match="rows 60 to 71 of 67"):
        pack(random_grouped("4 bits")).narrow(60, 11)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bits": 7}, "codes have 7 bits"),
        ({"group": 8}, "group 8 must be at least 16"),
        ({"span": 48}, "must .*divide span 48"),
        ({"zero": 16}, "out of range"),
        ({"table": (1, 2)}, "table of 2 values"),
        ({"table": (200,) * 16}, "out of range"),
        ({"table": (1,) * 16, "zero": 3}, "zero 3 do not fit"),
        ({"bits": 5, "table": (1,) * 32}, "do not fit 5 bits"),
    ],
)
def test_layouts_without_sense(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(**({"bits": 4, "group": 32, "span": 32} | values))  # type: ignore[arg-type]


def test_parts_that_do_not_fit() -> None:
    layout = Layout(4, 32, 64)
    codes = torch.zeros(2, 96, dtype=torch.uint8)
    scales, steps = torch.ones(2, 2), torch.ones(2, 3, dtype=torch.int8)
    Grouped(layout, codes, scales, steps)
    for parts, message in (
        ((layout, codes.int(), scales, steps), r"codes are torch.int32"),
        ((layout, codes, scales[:, :1], steps), r"scales are .*expected floats \[2, 2\]"),
        ((layout, codes, scales, steps.short()), r"sub_scales are torch.int16"),
        ((layout, codes, scales), "needs sub_scales"),
        ((layout, codes, scales, steps, scales), "and sub_mins where there are mins"),
        ((layout, codes, scales, steps, None, steps), "sub_mins without mins"),
        ((Layout(4, 48, 48), codes, scales), "do not fit blocks of 128"),
    ):
        with pytest.raises(ValueError, match=message):
            Grouped(*parts)  # type: ignore[arg-type]
