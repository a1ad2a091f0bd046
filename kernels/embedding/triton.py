# pyrefly: ignore-errors
"""The kernel; `take` starts it and says what it does. `kernels.linear.packing` says how the codes lie."""

import triton
import triton.language as tl

from kernels.linear import bits
from kernels.linear.triton import _scale, _scale_word, _words


@triton.jit(do_not_specialize=["count"])
def take(
    rows_ptr, codes_ptr, scales_ptr, row_scale_ptr, out_ptr, count, N, K, code_stride,
    FORMAT: tl.constexpr, UNIT: tl.constexpr, COUNT: tl.constexpr, UNITS: tl.constexpr, HALF: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """COUNT of the rows that are asked for, UNITS units of columns."""
    place = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    held = tl.minimum(unit, (K + UNIT - 1) // UNIT - 1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.load(rows_ptr + place, mask=place < count, other=0).to(tl.int64)
    if FORMAT == "fp8" or FORMAT == "fp8-block":
        spot = rows[None, :, None] * code_stride + held[:, None, None] * 32
        w = tl.load(codes_ptr + spot + tl.arange(0, 32)[None, None, :])
        if FORMAT == "fp8":
            scale = tl.load(row_scale_ptr + rows)[None, :]
        else:
            of_row = (rows // 128)[None, :] * ((K + 127) // 128)
            scale = tl.load(scales_ptr + of_row + held[:, None]).to(tl.float32)
        for p in tl.static_range(2):
            _put(bits.fp8_pair(w, p, ASM), scale, out_ptr, place, count, unit * 128 + p * 64, K, 64)
    elif FORMAT == "nvfp4":
        w = _words(codes_ptr, held, 0, 1, rows, N)
        scales = _scale_word(scales_ptr, held, 0, 1, rows, N)
        scale = tl.load(row_scale_ptr + rows)[None, :]
        if ASM:
            scale *= 65536.0
        for p in tl.static_range(4):
            _put(bits.nvfp4_pair(w, scales, p, ASM), scale, out_ptr, place, count, unit * 64 + p * 16, K, 16)
    elif FORMAT == "int3-g128":
        w0 = _words(codes_ptr, held, 0, 3, rows, N)
        w1 = _words(codes_ptr, held, 1, 3, rows, N)
        w2 = _words(codes_ptr, held, 2, 3, rows, N)
        scales = _scale_word(scales_ptr, held, 0, 1, rows, N)
        for p in tl.static_range(16):
            scale = _scale(scales, p // 8, HALF)
            _put(bits.int3_pair(w0, w1, w2, p, ASM), scale, out_ptr, place, count, unit * 256 + p * 16, K, 16)
    elif FORMAT == "int8-g32":
        low = _words(codes_ptr, held, 0, 2, rows, N)
        high = _words(codes_ptr, held, 1, 2, rows, N)
        scales = _scale_word(scales_ptr, held, 0, 1, rows, N)
        for p in tl.static_range(4):
            scale = _scale(scales, p // 2, HALF)
            _put(bits.int8_pair(low, high, p, ASM), scale, out_ptr, place, count, unit * 64 + p * 16, K, 16)
    else:  # a plane of nibbles for each group, and one of the bits above them
        NIBBLES: tl.constexpr = UNIT // 64
        ALL: tl.constexpr = NIBBLES if FORMAT == "int4-g64" else NIBBLES + 1
        high = _words(codes_ptr, held, ALL - 1, ALL, rows, N)
        for plane in tl.static_range(NIBBLES):
            w = _words(codes_ptr, held, plane, ALL, rows, N)
            scale = _scale(_scale_word(scales_ptr, held, plane // 2, NIBBLES // 2, rows, N), plane % 2, HALF)
            for p in tl.static_range(4):
                if FORMAT == "int4-g64":
                    a = bits.int4_pair(w, p, ASM)
                elif FORMAT == "int5-g64":
                    a = bits.int5_pair(w, high, p, 4 * plane + p, ASM)
                else:
                    a = bits.int6_pair(w, high, p, 2 * (4 * plane + p), ASM)
                _put(a, scale, out_ptr, place, count, unit * UNIT + plane * 64 + p * 16, K, 16)


@triton.jit
def _put(tile, scale, out_ptr, place, count, column, K, WIDE: tl.constexpr):
    """tile [units, rows, WIDE], scale [units or 1, rows], place [rows], column [units]."""
    k = column[:, None, None] + tl.arange(0, WIDE)[None, None, :]
    values = tile.to(tl.float32) * scale[:, :, None]
    kept = (place < count)[None, :, None] & (k < K)
    tl.store(out_ptr + place.to(tl.int64)[None, :, None] * K + k, values.to(out_ptr.dtype.element_ty), mask=kept)
