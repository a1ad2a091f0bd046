"""The devices that torch tests run on: `@pytest.mark.parametrize("device", DEVICES)`."""

import pytest
import torch

torch.set_num_threads(1)  # the tests' tensors are too small for more, and other processes run beside

DEVICES = [
    torch.device("cpu"),
    pytest.param(
        torch.device("cuda"),
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]
