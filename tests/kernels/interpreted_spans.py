"""The spans of a gated delta net on CPU tensors, in Triton's interpreter: a process of its own, since TRITON_INTERPRET
is read when the kernels are defined. It makes bfloat16 of float32 by cutting off, so columns of bfloat16 are checked
with inputs of bfloat16."""

import torch

from kernels.gated_delta.launch import SpanLaunch
from tests.kernels.replay_checks import Kinds, Shape
from tests.kernels.span_checks import check_front, check_prefill, check_rows, check_saturation, step

CPU = torch.device("cpu")
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
LENGTHS = (3, 64, 1, 65, 2, 63, 4)


def main() -> None:
    # Heads of odd sizes, two programs each for q, k and v, the second of each not full.
    odd, launch = Shape(3, 6, 12, 20), SpanLaunch(16, 64, 1)
    full = Kinds(FULL, FULL, FULL)
    check_front(step(odd, full, LENGTHS, CPU, 0, FULL, gaps=True), FULL, unit=False, launch=launch)
    # Tiles as short as may be, so that spans begin and end in any place of one.
    short = Shape(1, 2, 16, 16)
    launch = SpanLaunch(4, 16, 1)
    check_front(step(short, Kinds(BRAIN, HALF, FULL), (3, 9, 1, 4, 2, 5), CPU, 1, BRAIN, gaps=True), HALF, True, launch)
    check_front(step(short, Kinds(HALF, BRAIN, FULL), (6, 1), CPU, 2, FULL, gaps=False), BRAIN, True, launch)
    small = step(Shape(1, 2, 16, 16, width=2), full, (1, 3), CPU, 3, FULL, gaps=True)
    for x in (small.inputs.mixed, small.columns):
        x[..., :16] *= 1e-3  # q, whose norm is the epsilon's mostly
    check_front(small, FULL, True, launch)
    check_rows(step(short, full, (2, 6, 1), CPU, 4, FULL, gaps=True), HALF, launch)
    for unit in (False, True):
        check_saturation(step(short, full, (2, 1), CPU, 7, FULL, gaps=True), unit)
    check_prefill(step(short, Kinds(FULL, FULL, HALF), (70, 1, 3), CPU, 5, FULL, gaps=True), FULL, 1e-3)
    check_prefill(step(short, full, (18,), CPU, 6, FULL, gaps=False), FULL, 1e-5)
    print("all right")


if __name__ == "__main__":
    main()
