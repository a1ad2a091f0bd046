"""The kernels for packed weights on CPU tensors, in Triton's interpreter: a process of its own, since TRITON_INTERPRET
is read when the kernels are defined. Its bfloat16 arithmetic is wrong, so there the kernels decode to float32."""

import torch

from kernels.linear.expand import expand
from kernels.linear.launch import Launch
from kernels.linear.packing import unit_columns
from kernels.linear.quantized import FORMATS, dequantize
from kernels.linear.stream import stream
from kernels.linear.weight import pack
from tests.kernels.packed_matrices import random_quantized

CASES = (
    # rows, columns, rows of x, (tile, slices, units, splits), SwiGLU, residual
    (48, 320, 1, (32, 2, 1, 1), False, False),
    (33, 576, 3, (32, 2, 1, 3), False, True),
    (36, 272, 9, (16, 1, 2, 2), True, False),
)


def check(format: str, number: int) -> None:
    rows, columns, count, (tile, slices, units, splits), swiglu, residual = CASES[number]
    quantized = random_quantized(
        format, rows, columns, seed=number, scale_dtype=(torch.bfloat16, torch.float16)[number % 2]
    )
    weight = pack(quantized)
    exact = dequantize(quantized)
    plain = torch.full((rows - 2, columns), torch.nan)
    expand(weight, 1, rows - 2, plain)
    assert torch.equal(plain, exact[1 : rows - 1]), format

    generator = torch.Generator().manual_seed(number)
    x = torch.randn(count, columns, generator=generator).to(torch.bfloat16)
    expected = x.double() @ exact.double().t()
    size = x.double().abs() @ exact.double().abs().t()
    if swiglu:
        gate, up = expected.chunk(2, dim=-1)
        expected = gate * gate.sigmoid() * up
        size = size[:, : rows // 2] * up.abs() + 1
    out = torch.full(expected.shape, torch.nan)
    added = torch.randn(expected.shape, generator=generator) if residual else None
    stream(x, weight, Launch(tile, slices, units, splits, warps=4, stages=2), out, added, swiglu)
    expected = expected if added is None else expected + added
    assert float(((out.double() - expected).abs() / (size + 1)).max()) < 1e-6, (format, number)


def main() -> None:
    for place, format in enumerate(FORMATS):
        assert unit_columns(format) in (64, 128, 256)
        for number in (place % 3, (place + 1) % 3):
            check(format, number)
    print("all right")


if __name__ == "__main__":
    main()
