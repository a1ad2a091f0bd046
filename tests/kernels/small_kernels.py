"""Checks of the kernels between the products, the same ones for the interpreter and for a GPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.elementwise import launches as elementwise
from kernels.elementwise import reference as elementwise_reference
from kernels.embedding.take import take
from kernels.linear.few_rows import few_rows
from kernels.linear.quantized import dequantize
from kernels.linear.weight import pack
from kernels.norm_rope import launches as norm_rope
from kernels.norm_rope import reference as norm_rope_reference
from tests.kernels.packed_matrices import random_quantized


@dataclass(frozen=True, slots=True)
class Draw:
    """Fresh numbers of a seed, as views of tensors that are NaN around them."""

    seed: int
    device: torch.device

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 2.0, name: int = 0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(1000 * self.seed + name)
        sizes = (*(size + 1 for size in shape[:-1]), shape[-1] + 32)
        around = torch.full(sizes, torch.nan, dtype=dtype, device=self.device)
        inner = around[tuple(slice(0, size) for size in shape[:-1])][..., 16 : 16 + shape[-1]]
        inner.copy_(torch.randn(shape, generator=generator, device=self.device) * scale)
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # weights may be read before the kernel before has ended
        return inner


def near(got: Tensor, expected: Tensor, bound: float) -> None:
    """By each element's error, relative where it is above 1; NaN fails."""
    assert got.shape == expected.shape
    assert got.is_contiguous()
    error = (got.double() - expected.double()).abs() / expected.double().abs().clamp(min=1)
    assert float(error.max()) <= bound, float(error.max())


def step(dtype: torch.dtype) -> float:
    """Two units of the last place of numbers around 1: one for a rounding that falls to the other side."""
    return 2 * torch.finfo(dtype).eps


def check_norms(
    draw: Draw, shape: tuple[int, ...], kinds: tuple[torch.dtype, torch.dtype, torch.dtype], pdl: bool
) -> None:
    """kinds: of x, of gate and weights, of the result."""
    x_dtype, weight_dtype, dtype = kinds
    x, gate = draw(*shape, dtype=x_dtype, name=1), draw(*shape, dtype=weight_dtype, name=2)
    weight = draw(shape[-1], dtype=weight_dtype, scale=1, name=3)
    rms = norm_rope_reference.rms_norm(x, weight, 1e-6)
    found = norm_rope.norm("plain", x, None, weight, 1e-6, rms.dtype, pdl)
    near(found, rms, step(x_dtype) + step(rms.dtype) + 2e-6)
    found = norm_rope.norm("centred", x, None, weight, 1e-6, dtype, pdl)
    near(found, norm_rope_reference.rms_norm_centred(x, weight, 1e-6, dtype), step(dtype) + 2e-6)
    found = norm_rope.norm("gated", x, gate, weight, 1e-6, dtype, pdl)
    near(found, norm_rope_reference.rms_norm_gated(x, gate, weight, 1e-6, dtype), step(dtype) + 2e-6)


def check_angles(positions: Tensor, frequencies: Tensor, pdl: bool) -> None:
    """The last place of the exact value of the reference's rounded angles is never missed by more than one."""
    angles = (positions.float()[:, None] * frequencies).double().cpu()
    for got, exact in zip(
        norm_rope.rotary_angles(positions, frequencies, pdl), (angles.cos(), angles.sin()), strict=True
    ):
        value = exact.float()
        place = torch.nextafter(value.abs(), torch.tensor(torch.inf)) - value.abs()
        assert float(((got.cpu().double() - exact).abs() / place.double()).max()) <= 0.51
        assert got.is_contiguous()


def check_gates(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype, pdl: bool) -> None:
    x, gate = draw(*shape, dtype=dtype, name=4), draw(*shape, dtype=dtype, scale=8, name=5)
    gate[0].fill_(-200)
    gate[-1].fill_(200)
    near(elementwise.sigmoid_gated(x, gate, pdl), elementwise_reference.sigmoid_gated(x, gate), step(dtype) + 1e-6)
    both = draw(shape[0], 2 * shape[-1], dtype=dtype, scale=8, name=6)
    both[0, 0], both[-1, shape[-1] - 1] = -200, 200
    near(elementwise.silu_gated(both, pdl), elementwise_reference.silu_gated(both), step(dtype) + 1e-6)
    residual = draw(shape[0], shape[-1], name=7)
    other = draw(shape[0], shape[-1], dtype=dtype, name=8)
    assert torch.equal(elementwise.add(residual, other, pdl), residual + other)


def check_few_rows(draw: Draw, rows: int, outputs: int, columns: int, dtype: torch.dtype, pdl: bool) -> None:
    x, weight = draw(rows, columns, dtype=dtype, name=9), draw(outputs, columns, dtype=dtype, name=10)
    bias, residual = draw(outputs, dtype=dtype, name=11), draw(rows, outputs, name=12).contiguous()
    product = x.double() @ weight.double().t()
    # The size of a sum of such terms whose signs are chance. Errors are of that size, and not of the sum that is left.
    size = (x.double().square() @ weight.double().square().t()).sqrt()
    plain, whole = (few_rows(x, weight, *more, torch.float32, pdl) for more in ((None, None), (bias, residual)))
    for found, exact in ((plain, product), (whole, product + bias.double() + residual.double())):
        assert found.is_contiguous()
        error = (found.double() - exact).abs() / (size + exact.abs()) / 2**-24
        assert float(error.max()) <= _additions(x), float(error.max())
    again = few_rows(x, weight, bias, residual, torch.bfloat16, pdl)
    assert torch.equal(few_rows(x, weight, bias, residual, torch.bfloat16, pdl), again)


def _additions(x: Tensor) -> int:
    """That follow each other in `few_rows`, each with an error of half a last place of what it has added up by then.
    Matrix instructions, of 16 columns, cut their sum off instead, which is twice that at most and always towards 0."""
    columns = x.shape[1]
    if len(x) <= 16 or x.dtype == torch.float32:
        return -(-columns // 1024) + 10 + 2  # blocks, the halvings of one block, bias and residual
    return -(-columns // 512) * 4 + 3 + 2  # instructions of a slice, the halvings of 8 slices


def check_take(
    format: str, rows: int, columns: int, scale_dtype: torch.dtype, device: torch.device, dtype: torch.dtype, pdl: bool
) -> None:
    """One, and several with repetitions, of both ends."""
    quantized = random_quantized(format, rows, columns, scale_dtype=scale_dtype)
    exact, packed = dequantize(quantized), pack(quantized).to(device)
    for asked in ([rows - 1], [5, 0, rows - 1, rows // 2, 5]):
        found = take(torch.tensor(asked, device=device), packed, dtype, pdl)
        assert torch.equal(found.cpu(), exact[asked].to(dtype)), (format, asked)
