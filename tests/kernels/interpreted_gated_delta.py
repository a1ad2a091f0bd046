"""Decode, verify and fold on CPU tensors, in Triton's interpreter: a process of its own, since TRITON_INTERPRET is read
when the kernels are defined. It makes bfloat16 of float32 by cutting off, so bounds with it are wider."""

import torch

from kernels.gated_delta import replay
from tests.kernels.replay_checks import WIDE, Kinds, Shape, check_replay

CPU = torch.device("cpu")
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


def main() -> None:
    # Two tiles a head, the second not full; sequences with nothing to verify, nothing accepted, all accepted.
    check_replay(replay, Shape(1, 2, 12, 20), WIDE, ((3, 1), (0, 0), (1, 1), (2, 0)), CPU, 1e-6)
    check_replay(replay, Shape(2, 2, 16, 8), Kinds(FULL, HALF, HALF), ((3, 2), (1, 1)), CPU, 3e-3, seed=1)
    check_replay(replay, Shape(1, 1, 32, 16), Kinds(BRAIN, HALF, BRAIN), ((3, 2),), CPU, 6e-2, seed=2)
    check_replay(replay, Shape(1, 1, 16, 16, width=2), Kinds(HALF, HALF, FULL), ((8, 5),), CPU, 3e-3, seed=3, rounds=1)
    print("all right")


if __name__ == "__main__":
    main()
