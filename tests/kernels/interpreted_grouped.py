"""The grouped kernels on CPU tensors, in Triton's interpreter: a process of its own, since TRITON_INTERPRET is read
when the kernels are defined. The interpreter's bfloat16 arithmetic is wrong, so x and dot are float32 here."""

import torch
import triton.language as tl
from torch import Tensor

from kernels.linear.grouped import fused
from kernels.linear.grouped.form import dequantize
from kernels.linear.grouped.weight import pack
from tests.kernels.grouped_matrices import LAYOUTS, random_grouped

_empty = torch.empty


def poisoned(*args: object, **options: object) -> Tensor:
    """What a kernel does not write must be seen."""
    tensor = _empty(*args, **options)  # type: ignore[call-overload]
    return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor


def check(name: str, counts: tuple[int, ...]) -> None:
    grouped = random_grouped(name)
    weight = pack(grouped)
    exact = dequantize(grouped)
    assert torch.equal(fused.decode(weight, torch.float32), exact), name
    generator = torch.Generator().manual_seed(2)
    for count in counts:
        x = torch.randn(count, grouped.columns, generator=generator)
        bias = torch.randn(grouped.rows, generator=generator) if count % 2 else None
        out = fused.few_rows(x, weight, bias, processors=3, dot=tl.float32)
        expected = x.double() @ exact.double().t() + (0 if bias is None else bias.double())
        size = x.double().abs() @ exact.double().abs().t() + 1e-3
        assert float(((out.double() - expected).abs() / size).max()) < 1e-6, (name, count)
    part = weight.narrow(1, 2)
    assert torch.equal(fused.decode(part, torch.float32), exact[1:3]), name


def main() -> None:
    torch.empty = poisoned  # type: ignore[assignment]
    for number, name in enumerate(LAYOUTS):
        check(name, ((1, 18), (3,), (1,))[number % 3])
    print("all right")


if __name__ == "__main__":
    main()
