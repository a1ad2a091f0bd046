"""The kernels between the products on CPU tensors, in Triton's interpreter: a process of its own, since
TRITON_INTERPRET is read when the kernels are defined. It cuts bfloat16 off instead of rounding, so results are float32
and float16."""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kernels.linear.quantized import FORMATS
from tests.kernels.small_kernels import Draw, check_angles, check_few_rows, check_gates, check_norms, check_take

CPU = torch.device("cpu")
BRAIN, HALF, FULL = torch.bfloat16, torch.float16, torch.float32


def poisoned(*shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """In place of `torch.empty`, for the kernels' results."""
    return torch.full(shape if isinstance(shape[0], int) else shape[0], torch.nan, dtype=dtype, device=device)


@patch.object(torch, "empty", poisoned)
def main() -> None:
    for seed, shape in enumerate(((1, 1), (3, 100), (2, 3, 16), (5, 3, 20), (1, 7, 128), (2, 2500))):
        draw = Draw(seed, CPU)
        for kinds in ((FULL, BRAIN, FULL), (HALF, FULL, HALF), (HALF, HALF, FULL)):
            check_norms(draw, shape, kinds, pdl=False)
        for dtype in (HALF, FULL):
            check_gates(draw, shape, dtype, pdl=False)
    frequencies = 1.0 / 1e7 ** (torch.arange(32) / 32)
    check_angles(torch.tensor([0, 1, 2, 3, 63, 4097, 100_003, 131_071, 262_143, 262_144]), frequencies, pdl=False)
    check_angles(torch.randint(0, 2**18, (33,)), frequencies[:11], pdl=False)
    for number, (rows, outputs, columns) in enumerate(((1, 3, 1024), (2, 2, 100), (17, 20, 600), (7, 5, 1300))):
        check_few_rows(Draw(number, CPU), rows, outputs, columns, (BRAIN, FULL)[number % 2], pdl=False)
    for place, format in enumerate(FORMATS):
        rows, columns, scale_dtype = ((130, 200, BRAIN), (17, 320, HALF))[place % 2]
        check_take(format, rows, columns, scale_dtype, CPU, FULL, pdl=False)
    print("all right")


if __name__ == "__main__":
    main()
