"""The grouped kernels without a GPU: run by Triton's interpreter, and compiled for the GPUs that we serve on."""

import pytest
import triton.language as tl

from kernels.linear.grouped import fused, launch
from kernels.linear.grouped import triton as kernels
from kernels.linear.grouped.weight import pack
from tests.kernels.compiled import SHARED_LIMIT, resources, run_interpreted
from tests.kernels.grouped_matrices import random_grouped

_POINTERS = {
    "x": "*bf16",
    "out": "*fp32",
    "codes": "*i32",
    "scales": "*fp16",
    "mins": "*fp16",
    "sub_scales": "*i8",
    "sub_mins": "*i8",
}


def test_interpreted() -> None:
    """Odd shapes, poisoned outputs, every layout; see `interpreted_grouped`."""
    run_interpreted("tests.kernels.interpreted_grouped")


@pytest.mark.parametrize(
    ("capability", "kernel", "name", "count"),
    [
        (80, "few_rows", "5 bits, last super-block cut", 16),
        (80, "decode", "4 bits, mins in super-blocks", 1),
        (89, "few_rows", "table of 16", 64),
        (89, "one_row", "table of 8, scales for a block", 1),
        (90, "few_rows", "6 bits", 16),
        (90, "one_row", "4 bits, mins in super-blocks", 1),
        (120, "few_rows", "5 bits, last super-block cut", 32),
        (120, "decode", "6 bits", 1),
    ],
)
def test_compiled_ahead_of_time(capability: int, kernel: str, name: str, count: int) -> None:
    """No registers are spilled, and shared memory fits everywhere."""
    constants = fused.constants(pack(random_grouped(name)))
    plan = launch.few_rows(count, 5120, 136, 132)
    sizes = {
        "few_rows": {"TILE": plan.tile, "BATCH": plan.batch, "DOT": tl.bfloat16},
        "one_row": {"TILE": plan.tile},
        "decode": {"TILE": launch.DECODE_ROWS},
    }
    warps = plan.warps if kernel == "few_rows" else 4
    used = resources(getattr(kernels, kernel), {**constants, **sizes[kernel]}, _POINTERS, capability, warps)
    assert (used["STACK"], used["LOCAL"]) == (0, 0)
    assert used["SHARED"] <= SHARED_LIMIT


def test_plans() -> None:
    """Splits fill the GPU, but none is so small that it writes more than it reads."""
    assert launch.few_rows(1, 34816, 40, 132) == launch.FewRows(tile=64, batch=16, splits=1, warps=4)
    assert launch.few_rows(17, 5120, 136, 132).splits == 7
    assert launch.few_rows(64, 64, 8, 132) == launch.FewRows(tile=64, batch=64, splits=2, warps=8)
    assert launch.few_rows(1, 5, 1, 132).splits == 1
