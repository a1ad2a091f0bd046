# pyrefly: ignore-errors
"""The kernels; `stream`, `expand` and `rows_fp8` start them and say what they do.

A `return` in a branch on a constexpr needs its `else`: what follows would be compiled too.
"""

import triton
import triton.language as tl

from kernels.linear import bits

_E4M3_LARGEST = tl.constexpr(448.0)


@triton.jit
def stream(
    x_ptr, codes_ptr, scales_ptr, row_scale_ptr, residual_ptr, out_ptr, partial_ptr, arrived_ptr,
    M, N, K, x_stride, out_stride, code_stride, half, splits,
    FORMAT: tl.constexpr, UNIT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, SLICES: tl.constexpr,
    UNITS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, HALF: tl.constexpr, EVEN: tl.constexpr,
    SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """UNIT: columns of a unit. half: with SWIGLU the number of rows of gate, and of up below it; the outputs are `half`
    wide."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    in_tile = tl.arange(0, BN)
    if SWIGLU:  # the upper half of the tile is of gate, the lower of up
        column = tile * (BN // 2) + in_tile % (BN // 2)
        rows = tl.where(column < half, column, 0) + (in_tile // (BN // 2)) * half
    else:
        rows = tile * BN + in_tile
        rows = tl.where(rows < N, rows, 0)

    units = (K + UNIT - 1) // UNIT
    rounds = (units + UNITS * SLICES - 1) // (UNITS * SLICES)
    share = (rounds + splits - 1) // splits
    first = split * share
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((SLICES, BN, BM), tl.float32)
    last = tl.minimum(first + share, rounds)
    slices = tl.arange(0, SLICES)
    # Triton loads ahead what goes into a matrix instruction. The integers' scales do not: they are read a round ahead.
    AHEAD: tl.constexpr = UNITS == 1 and (
        FORMAT == "int4-g64" or FORMAT == "int3-g128" or FORMAT == "int6-g64" or FORMAT == "int8-g32"
    )
    if AHEAD:
        ahead = _scale_word(scales_ptr, tl.minimum(first * SLICES + slices, units - 1), 0, 1, rows, N)
    for step in tl.range(first, last, num_stages=STAGES):
        for u in tl.static_range(UNITS):
            unit = (step * UNITS + u) * SLICES + slices
            held = unit if EVEN else tl.minimum(unit, units - 1)
            if AHEAD:
                scales = ahead
                ahead = _scale_word(scales_ptr, tl.minimum(unit + SLICES, units - 1), 0, 1, rows, N)
            elif FORMAT == "fp8" or FORMAT == "fp8-block" or FORMAT == "nvfp4" or FORMAT == "int5-g64":
                scales = held[:, None]  # not used
            else:
                scales = _scale_word(scales_ptr, held, 0, 1, rows, N)
            acc = _unit_product(
                acc, scales, x_ptr, codes_ptr, scales_ptr, unit, held, rows, m, M, N, K, x_stride, code_stride,
                FORMAT, UNIT, HALF, EVEN, ASM,
            )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.sum(acc, 0)
    if FORMAT == "fp8" or FORMAT == "nvfp4":
        row_scale = tl.load(row_scale_ptr + rows)
        if FORMAT == "nvfp4" and ASM:
            row_scale *= 65536.0
        total *= row_scale[:, None]

    if SPLIT:
        place = (tl.program_id(2) * tl.num_programs(0) + tile).to(tl.int64)
        spot = (in_tile[:, None] * BM + tl.arange(0, BM)[None, :]) + place * (splits * BN * BM)
        tl.store(partial_ptr + spot + split * (BN * BM), total)
        tl.debug_barrier()  # all stores of the program before the one thread that announces them
        before = tl.atomic_add(arrived_ptr + place, 1, sem="acq_rel")
        if before < splits - 1:
            return
        total = tl.zeros((BN, BM), tl.float32)
        for other in tl.range(0, splits):
            total += tl.load(partial_ptr + spot + other * (BN * BM), cache_modifier=".cg")
        tl.store(arrived_ptr + place, 0)

    if SWIGLU:
        gate, up = tl.split(total.reshape(2, BN // 2, BM).permute(1, 2, 0))
        result = gate / (1 + tl.exp(-gate)) * up
        n = tile * (BN // 2) + tl.arange(0, BN // 2)
        kept = (n < half)[:, None] & (m < M)[None, :]
    else:
        result = total
        n = tile * BN + in_tile
        kept = (n < N)[:, None] & (m < M)[None, :]
    target = m.to(tl.int64)[None, :] * out_stride + n[:, None]
    if RESIDUAL:
        result += tl.load(residual_ptr + target, mask=kept, other=0.0).to(tl.float32)
    tl.store(out_ptr + target, result.to(out_ptr.dtype.element_ty), mask=kept)


@triton.jit
def _x_tile(x_ptr, first, m, M, K, x_stride, WIDE: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr):
    """first int32 [slices] -> x[m, first : first + WIDE] as [slices, WIDE, BM]."""
    k = first[:, None, None] + tl.arange(0, WIDE)[None, :, None]
    inside = (m < M)[None, None, :]
    if not EVEN:
        inside = inside & (k < K)
    x = tl.load(x_ptr + m.to(tl.int64)[None, None, :] * x_stride + k, mask=inside, other=0.0)
    return x if ASM else x.to(tl.float32)


@triton.jit
def _dot(a, x, acc, ASM: tl.constexpr):
    if ASM:
        return tl.dot(a, x, acc)
    else:
        return tl.dot(a, x, acc, input_precision="ieee")


@triton.jit
def _unit_product(
    acc, words, x_ptr, codes_ptr, scales_ptr, unit, held, rows, m, M, N, K, x_stride, code_stride,
    FORMAT: tl.constexpr, UNIT: tl.constexpr, HALF: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc [slices, rows, m] plus the products of one unit of columns a slice. unit int32 [slices]; `held`: that which
    the codes are read of (x is zero beyond K). words int32 [slices, rows]: scales of two groups."""
    if FORMAT == "fp8" or FORMAT == "fp8-block":
        place = rows.to(tl.int64)[None, :, None] * code_stride + held[:, None, None] * 32
        w = tl.load(codes_ptr + place + tl.arange(0, 32)[None, None, :])
        part = acc if FORMAT == "fp8" else tl.zeros_like(acc)
        for p in tl.static_range(2):
            x = _x_tile(x_ptr, unit * 128 + p * 64, m, M, K, x_stride, 64, EVEN, ASM)
            part = _dot(bits.fp8_pair(w, p, ASM), x, part, ASM)
        if FORMAT == "fp8":
            acc = part
        else:
            of_row = (rows // 128).to(tl.int64)[None, :] * ((K + 127) // 128)
            acc += tl.load(scales_ptr + of_row + held[:, None]).to(tl.float32)[:, :, None] * part
    elif FORMAT == "nvfp4":
        w = _words(codes_ptr, held, 0, 1, rows, N)
        scales = tl.load(scales_ptr + held.to(tl.int64)[:, None] * N + rows[None, :])
        for p in tl.static_range(4):
            x = _x_tile(x_ptr, unit * 64 + p * 16, m, M, K, x_stride, 16, EVEN, ASM)
            acc = _dot(bits.nvfp4_pair(w, scales, p, ASM), x, acc, ASM)
    elif FORMAT == "int3-g128":
        w0 = _words(codes_ptr, held, 0, 3, rows, N)
        w1 = _words(codes_ptr, held, 1, 3, rows, N)
        w2 = _words(codes_ptr, held, 2, 3, rows, N)
        part = tl.zeros_like(acc)
        for p in tl.static_range(16):
            x = _x_tile(x_ptr, unit * 256 + p * 16, m, M, K, x_stride, 16, EVEN, ASM)
            part = _dot(bits.int3_pair(w0, w1, w2, p, ASM), x, part, ASM)
            if p % 8 == 7:
                acc += _scale(words, p // 8, HALF)[:, :, None] * part
                part = tl.zeros_like(acc)
    elif FORMAT == "int8-g32":
        low = _words(codes_ptr, held, 0, 2, rows, N)
        high = _words(codes_ptr, held, 1, 2, rows, N)
        part = tl.zeros_like(acc)
        for p in tl.static_range(4):
            x = _x_tile(x_ptr, unit * 64 + p * 16, m, M, K, x_stride, 16, EVEN, ASM)
            part = _dot(bits.int8_pair(low, high, p, ASM), x, part, ASM)
            if p % 2 == 1:
                acc += _scale(words, p // 2, HALF)[:, :, None] * part
                part = tl.zeros_like(acc)
    else:  # a plane of nibbles for each group, and one of the bits above them
        NIBBLES: tl.constexpr = UNIT // 64
        ALL: tl.constexpr = NIBBLES if FORMAT == "int4-g64" else NIBBLES + 1
        high = _words(codes_ptr, held, ALL - 1, ALL, rows, N)
        for plane in tl.static_range(NIBBLES):
            w = _words(codes_ptr, held, plane, ALL, rows, N)
            part = tl.zeros_like(acc)
            for p in tl.static_range(4):
                x = _x_tile(x_ptr, unit * UNIT + plane * 64 + p * 16, m, M, K, x_stride, 16, EVEN, ASM)
                if FORMAT == "int4-g64":
                    a = bits.int4_pair(w, p, ASM)
                elif FORMAT == "int5-g64":
                    a = bits.int5_pair(w, high, p, 4 * plane + p, ASM)
                else:
                    a = bits.int6_pair(w, high, p, 2 * (4 * plane + p), ASM)
                part = _dot(a, x, part, ASM)
            if FORMAT == "int5-g64":
                words = _scale_word(scales_ptr, held, plane // 2, 2, rows, N)
            acc += _scale(words, plane % 2, HALF)[:, :, None] * part
    return acc


@triton.jit
def _words(codes_ptr, unit, plane: tl.constexpr, PLANES: tl.constexpr, rows, N):
    start = (unit.to(tl.int64) * PLANES + plane)[:, None, None] * N * 8
    return tl.load(codes_ptr + start + rows[None, :, None] * 8 + tl.arange(0, 8)[None, None, :])


@triton.jit
def _scale_word(scales_ptr, unit, word: tl.constexpr, WORDS: tl.constexpr, rows, N):
    """int32 [slices, rows]: two of the unit's scales."""
    return tl.load(scales_ptr + (unit.to(tl.int64) * WORDS + word)[:, None] * N + rows[None, :])


@triton.jit
def _scale(words, which: tl.constexpr, HALF: tl.constexpr):
    """float32, of the lower or upper 16 bits: float16 with HALF, else bfloat16."""
    if HALF:
        return (words >> (16 * which)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif which == 0:
        return (words << 16).to(tl.float32, bitcast=True)
    else:
        return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def expand(
    codes_ptr, scales_ptr, row_scale_ptr, out_ptr, first_row, rows, N, K, code_stride,
    FORMAT: tl.constexpr, UNIT: tl.constexpr, BN: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Rows [first_row, first_row + rows) of N: out [rows, K]."""
    inside = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.where(inside < rows, first_row + inside, first_row)
    unit = tl.program_id(1) + tl.zeros((1,), tl.int32)
    if FORMAT == "fp8" or FORMAT == "fp8-block":
        place = row.to(tl.int64)[None, :, None] * code_stride + unit[:, None, None] * 32
        w = tl.load(codes_ptr + place + tl.arange(0, 32)[None, None, :])
        if FORMAT == "fp8":
            scale = tl.load(row_scale_ptr + row)
        else:
            scale = tl.load(scales_ptr + (row // 128).to(tl.int64) * ((K + 127) // 128) + tl.program_id(1)).to(
                tl.float32
            )
        for p in tl.static_range(2):
            _store(bits.fp8_pair(w, p, ASM), scale, out_ptr, inside, rows, unit * 128 + p * 64, K, BN, 64)
    elif FORMAT == "nvfp4":
        w = _words(codes_ptr, unit, 0, 1, row, N)
        scales = tl.load(scales_ptr + unit.to(tl.int64)[:, None] * N + row[None, :])
        scale = tl.load(row_scale_ptr + row)
        if ASM:
            scale *= 65536.0
        for p in tl.static_range(4):
            _store(bits.nvfp4_pair(w, scales, p, ASM), scale, out_ptr, inside, rows, unit * 64 + p * 16, K, BN, 16)
    elif FORMAT == "int3-g128":
        w0 = _words(codes_ptr, unit, 0, 3, row, N)
        w1 = _words(codes_ptr, unit, 1, 3, row, N)
        w2 = _words(codes_ptr, unit, 2, 3, row, N)
        for p in tl.static_range(16):
            scale = _row_scale16(scales_ptr, unit, p // 8, 2, row, N, HALF)
            _store(bits.int3_pair(w0, w1, w2, p, ASM), scale, out_ptr, inside, rows, unit * 256 + p * 16, K, BN, 16)
    elif FORMAT == "int8-g32":
        low = _words(codes_ptr, unit, 0, 2, row, N)
        high = _words(codes_ptr, unit, 1, 2, row, N)
        for p in tl.static_range(4):
            scale = _row_scale16(scales_ptr, unit, p // 2, 2, row, N, HALF)
            _store(bits.int8_pair(low, high, p, ASM), scale, out_ptr, inside, rows, unit * 64 + p * 16, K, BN, 16)
    else:
        NIBBLES: tl.constexpr = UNIT // 64
        ALL: tl.constexpr = NIBBLES if FORMAT == "int4-g64" else NIBBLES + 1
        high = _words(codes_ptr, unit, ALL - 1, ALL, row, N)
        for plane in tl.static_range(NIBBLES):
            w = _words(codes_ptr, unit, plane, ALL, row, N)
            scale = _row_scale16(scales_ptr, unit, plane, NIBBLES, row, N, HALF)
            for p in tl.static_range(4):
                if FORMAT == "int4-g64":
                    a = bits.int4_pair(w, p, ASM)
                elif FORMAT == "int5-g64":
                    a = bits.int5_pair(w, high, p, 4 * plane + p, ASM)
                else:
                    a = bits.int6_pair(w, high, p, 2 * (4 * plane + p), ASM)
                _store(a, scale, out_ptr, inside, rows, unit * UNIT + plane * 64 + p * 16, K, BN, 16)


@triton.jit
def _row_scale16(scales_ptr, unit, group: tl.constexpr, GROUPS: tl.constexpr, rows, N, HALF: tl.constexpr):
    """float32 [rows]. scales_ptr: 16-bit words, two groups beside each other."""
    word = (tl.sum(unit, 0).to(tl.int64) * (GROUPS // 2) + group // 2) * N * 2
    bits16 = tl.load(scales_ptr + word + rows * 2 + group % 2)
    if HALF:
        return bits16.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (bits16.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _store(tile, scale, out_ptr, inside, rows, column, K, BN: tl.constexpr, WIDE: tl.constexpr):
    values = tile.reshape(BN, WIDE).to(tl.float32) * scale[:, None]
    k = column + tl.arange(0, WIDE)
    target = out_ptr + inside.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(target, values.to(out_ptr.dtype.element_ty), mask=(inside < rows)[:, None] & (k < K)[None, :])


@triton.jit
def quantize_rows(x_ptr, out_ptr, scale_ptr, K, padded, x_stride, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDE)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-12) / _E4M3_LARGEST
    tl.store(scale_ptr + row, scale)
    # Rounding up of scale may leave x / scale a little over the largest, which e4m3 would turn into NaN.
    codes = tl.minimum(tl.maximum(x / scale, -_E4M3_LARGEST), _E4M3_LARGEST).to(tl.float8e4nv)
    inside = k % 128
    place = k - inside + inside % 64 // 2 * 4 + inside % 2 * 2 + inside // 64
    tl.store(out_ptr + row * padded + place, codes, mask=k < padded)
