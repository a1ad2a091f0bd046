"""The attention kernel of coded pages as it runs on a GPU, PTX included: in Triton's interpreter, which knows no PTX,
with numpy doing what the instructions do. So it is seen that each code becomes the right number in the right place.

A process of its own, as `interpreted_attention`; arguments: the formats.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from kernels.attention import decode as attention
from kernels.attention.launch import DecodeLaunch
from kernels.kv_codec import KvFormat, kv_form
from tests.kernels.interpreted_attention import CODED, check, decoded
from tests.kernels.paged_sequences import paged_sequences


def emulated(assembly: str, constraints: str, args: Sequence[Any], **_: object) -> Any:
    """In the place of `tl.inline_asm_elementwise`."""
    shape = np.broadcast_shapes(*(arg.handle.data.shape for arg in args))
    words = [np.broadcast_to(arg.handle.data, shape).view(np.uint32).astype(np.uint64) for arg in args]
    if assembly.startswith("prmt"):
        return _tensor(_prmt(*words))
    if assembly.startswith("lop3") and assembly.endswith("0x6A;"):
        return _tensor((words[0] & words[1]) ^ words[2])
    if assembly.startswith("fma.rn.f16x2"):
        (a, a_high), (b, b_high), (c, c_high) = (_halves(word) for word in words)
        return _tensor(_word(a * b + c, a_high * b_high + c_high))
    if "cvt.rn.f16x2.e4m3x2" in assembly:
        numbers = [_e4m3(words[0] >> np.uint64(8 * place)) for place in range(4)]
        return _tensor(_word(numbers[0], numbers[1])), _tensor(_word(numbers[2], numbers[3]))
    assert assembly == "mov.b32 {$0, $1}, $2;", assembly
    return tuple(_tensor(half.astype(np.float16), tl.float16) for half in _halves(words[0]))


def _tensor(data: Any, kind: Any = tl.int32) -> Any:
    kept = data if kind is tl.float16 else (data & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
    return tl.tensor(TensorHandle(kept, kind), tl.block_type(kind, list(kept.shape)))


def _prmt(a: Any, b: Any, choice: Any) -> Any:
    word = np.zeros_like(a)
    for place in range(4):
        source = int(choice.flat[0]) >> (4 * place) & 15
        byte = (a if source < 4 else b) >> np.uint64(8 * (source % 4)) & np.uint64(255)
        word |= byte << np.uint64(8 * place)
    return word


def _halves(word: Any) -> tuple[Any, Any]:
    """Two float16 as float64, where a product and a sum of such numbers are exact."""
    lower, upper = ((word >> np.uint64(move)).astype(np.uint16).view(np.float16) for move in (0, 16))
    return lower.astype(np.float64), upper.astype(np.float64)


def _word(lower: Any, upper: Any) -> Any:
    bits = [half.astype(np.float16).view(np.uint16).astype(np.uint64) for half in (lower, upper)]
    return bits[0] | bits[1] << np.uint64(16)


def _e4m3(byte: Any) -> Any:
    return torch.from_numpy(byte.astype(np.uint8)).view(torch.float8_e4m3fn).half().numpy()


def run(name: KvFormat) -> None:
    form = kv_form(name, torch.float16)
    case = paged_sequences((1, 3), (30, 65), 4, 2, 128, torch.float16, form=form)
    for converts in (False, True) if name == "fp8" else (True,):
        check(decoded(case, DecodeLaunch(8, 16, 4, 2, splits=2, slices=4, converts=converts)), case)


if __name__ == "__main__":
    tl.inline_asm_elementwise = emulated
    attention.wide = lambda _: False  # as on a GPU
    for chosen in CODED:
        if chosen in sys.argv[1:]:
            run(chosen)
    print("all right")
