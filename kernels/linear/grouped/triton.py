# pyrefly: ignore-errors
"""Kernels over `GroupedWeight`. Codes are read once each; sums are in float32 and in a fixed order.

Layouts of the pointers are those of `GroupedWeight`; `*_step` is the distance of two blocks (spans) in elements. WORDS
and all that follows from a `Layout` are compile-time constants, the counts of rows and columns are not.
"""

import triton
import triton.language as tl

from kernels.linear.grouped.form import BLOCK
from kernels.linear.grouped.planes import LANES, PLACES

_LANES = tl.constexpr(LANES)
_PLACES = tl.constexpr(PLACES)
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _plane(base, lane, kept, bits: tl.constexpr):
    """Words [rows, lanes] of a plane, shifted so that place 0 of each lane is in the lowest bits."""
    shared: tl.constexpr = 4 // bits
    loaded = tl.load(base + (lane // shared)[None, :], mask=kept[:, None], other=0)
    return loaded >> ((lane % shared) * (_PLACES * bits))[None, :]


@triton.jit
def _planes(base, lane, kept, BITS: tl.constexpr):
    """The two planes of a block, base [rows, 1]; the second is anything where codes have one plane only."""
    first: tl.constexpr = BITS if BITS <= 2 else (2 if BITS == 3 else 4)
    low = _plane(base, lane, kept, first)
    high = low
    if first < BITS:
        high = _plane(base + 4 * first, lane, kept, BITS - first)
    return low, high


@triton.jit
def _values(low, high, place: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr):
    """v(code) of one run of 16 columns as int32 [rows, lanes]. TABLE: () or four words of four int8 values."""
    first: tl.constexpr = BITS if BITS <= 2 else (2 if BITS == 3 else 4)
    code = (low >> (place * first)) & ((1 << first) - 1)
    if first < BITS:
        rest: tl.constexpr = BITS - first
        code |= ((high >> (place * rest)) & ((1 << rest) - 1)) << first
    if len(TABLE) == 0:
        value = code - ZERO
    else:
        if BITS == 4:
            low_half = tl.where((code & 4) != 0, TABLE[1], TABLE[0])
            word = tl.where((code & 8) != 0, tl.where((code & 4) != 0, TABLE[3], TABLE[2]), low_half)
        elif BITS == 3:
            word = tl.where((code & 4) != 0, TABLE[1], TABLE[0])
        else:
            word = tl.full(code.shape, TABLE[0], tl.int32)
        value = (word << (24 - (code & 3) * 8)) >> 24
    return value


@triton.jit
def _factor(
    coarse, fine, coarse_step, fine_step, block, row, kept, place: tl.constexpr,
    GROUP: tl.constexpr, SPAN: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """Scale or min of a run, float32 [rows]."""
    if SPAN < _BLOCK:
        at = block * coarse_step + row * (_BLOCK // SPAN) + place * _LANES // SPAN
    else:
        at = (block * _BLOCK // SPAN) * coarse_step + row
    factor = tl.load(coarse + at, mask=kept, other=0).to(tl.float32)
    if FINE:
        if GROUP < _BLOCK:
            at = block * fine_step + row * (_BLOCK // GROUP) + place * _LANES // GROUP
        else:
            at = block * fine_step + row
        factor *= tl.load(fine + at, mask=kept, other=0).to(tl.float32)
    return factor


@triton.jit(do_not_specialize=["count", "rows", "columns", "blocks", "blocks_a_split"])
def few_rows(
    x, out, codes, scales, sub_scales, mins, sub_mins,
    codes_step, scales_step, sub_scales_step, mins_step, sub_mins_step,
    count, rows, columns, blocks, blocks_a_split,
    BITS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
    SUB_SCALES: tl.constexpr, MINS: tl.constexpr, SUB_MINS: tl.constexpr,
    TILE: tl.constexpr, BATCH: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """x [count, columns] -> out float32 [splits, count, rows]: the sums over one split's blocks."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    split = tl.program_id(1)
    lane = tl.arange(0, _LANES)
    sample = tl.arange(0, BATCH)
    kept = row < rows
    run: tl.constexpr = GROUP if GROUP < _BLOCK else _BLOCK
    total = tl.zeros((TILE, BATCH), dtype=tl.float32)
    for block in range(split * blocks_a_split, tl.minimum(split * blocks_a_split + blocks_a_split, blocks)):
        block = tl.cast(block, tl.int64)
        low, high = _planes(codes + block * codes_step + row[:, None] * (4 * BITS), lane, kept, BITS)
        for place in tl.static_range(_PLACES):
            if place * _LANES % run == 0:
                part = tl.zeros((TILE, BATCH), dtype=tl.float32)
                sums = tl.zeros((_LANES, BATCH), dtype=tl.float32)
            column = block * _BLOCK + place * _LANES + lane
            piece = tl.load(
                x + sample[None, :].to(tl.int64) * columns + column[:, None],
                mask=(sample < count)[None, :] & (column < columns)[:, None],
                other=0,
            )
            value = _values(low, high, place, BITS, ZERO, TABLE)
            # The interpreter's own bfloat16 arithmetic is wrong; there DOT is float32.
            part = tl.dot(value.to(tl.float32).to(DOT), piece.to(DOT), part, input_precision="ieee")
            if MINS:
                sums += piece.to(tl.float32)
            if (place + 1) * _LANES % run == 0:
                scale = _factor(
                    scales, sub_scales, scales_step, sub_scales_step, block, row, kept, place, GROUP, SPAN, SUB_SCALES
                )
                total += part * scale[:, None]
                if MINS:
                    least = _factor(
                        mins, sub_mins, mins_step, sub_mins_step, block, row, kept, place, GROUP, SPAN, SUB_MINS
                    )
                    total -= least[:, None] * tl.sum(sums, axis=0)[None, :]
    target = out + (split.to(tl.int64) * count + sample[None, :]) * rows + row[:, None]
    tl.store(target, total, mask=kept[:, None] & (sample < count)[None, :])


@triton.jit(do_not_specialize=["rows", "columns", "blocks", "blocks_a_split"])
def one_row(
    x, out, codes, scales, sub_scales, mins, sub_mins,
    codes_step, scales_step, sub_scales_step, mins_step, sub_mins_step,
    rows, columns, blocks, blocks_a_split,
    BITS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
    SUB_SCALES: tl.constexpr, MINS: tl.constexpr, SUB_MINS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """x [columns] -> out float32 [splits, rows], as `few_rows`; but each lane sums by itself in float32, and lanes meet
    only behind the last block: no matrix instruction, so no way of tiles through shared memory."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    split = tl.program_id(1)
    lane = tl.arange(0, _LANES)
    kept = row < rows
    run: tl.constexpr = GROUP if GROUP < _BLOCK else _BLOCK
    total = tl.zeros((TILE, _LANES), dtype=tl.float32)
    for block in range(split * blocks_a_split, tl.minimum(split * blocks_a_split + blocks_a_split, blocks)):
        block = tl.cast(block, tl.int64)
        low, high = _planes(codes + block * codes_step + row[:, None] * (4 * BITS), lane, kept, BITS)
        for place in tl.static_range(_PLACES):
            if place * _LANES % run == 0:
                part = tl.zeros((TILE, _LANES), dtype=tl.float32)
                sums = tl.zeros((_LANES,), dtype=tl.float32)
            column = block * _BLOCK + place * _LANES + lane
            piece = tl.load(x + column, mask=column < columns, other=0).to(tl.float32)
            part += _values(low, high, place, BITS, ZERO, TABLE).to(tl.float32) * piece[None, :]
            if MINS:
                sums += piece
            if (place + 1) * _LANES % run == 0:
                scale = _factor(
                    scales, sub_scales, scales_step, sub_scales_step, block, row, kept, place, GROUP, SPAN, SUB_SCALES
                )
                total += part * scale[:, None]
                if MINS:
                    least = _factor(
                        mins, sub_mins, mins_step, sub_mins_step, block, row, kept, place, GROUP, SPAN, SUB_MINS
                    )
                    total -= least[:, None] * sums[None, :]
    tl.store(out + split.to(tl.int64) * rows + row, tl.sum(total, axis=1), mask=kept)


@triton.jit(do_not_specialize=["count", "rows", "splits"])
def add_splits(parts, bias, out, count, rows, splits, BIAS: tl.constexpr, TILE: tl.constexpr):
    """float32 [splits, count, rows] (+ bias [rows]) -> out [count, rows], first split first."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    sample = tl.program_id(1).to(tl.int64)
    kept = row < rows
    total = tl.zeros((TILE,), dtype=tl.float32)
    for split in range(splits):
        total += tl.load(parts + (split * count + sample) * rows + row, mask=kept, other=0)
    if BIAS:
        total += tl.load(bias + row, mask=kept, other=0).to(tl.float32)
    tl.store(out + sample * rows + row, total.to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["rows", "columns"])
def decode(
    out, codes, scales, sub_scales, mins, sub_mins,
    codes_step, scales_step, sub_scales_step, mins_step, sub_mins_step,
    rows, columns,
    BITS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr,
    SUB_SCALES: tl.constexpr, MINS: tl.constexpr, SUB_MINS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out [rows, columns]: each value rounded from float32 once."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    block = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, _LANES)
    kept = row < rows
    run: tl.constexpr = GROUP if GROUP < _BLOCK else _BLOCK
    low, high = _planes(codes + block * codes_step + row[:, None] * (4 * BITS), lane, kept, BITS)
    for place in tl.static_range(_PLACES):
        if place * _LANES % run == 0:
            scale = _factor(
                scales, sub_scales, scales_step, sub_scales_step, block, row, kept, place, GROUP, SPAN, SUB_SCALES
            )
            if MINS:
                least = _factor(
                    mins, sub_mins, mins_step, sub_mins_step, block, row, kept, place, GROUP, SPAN, SUB_MINS
                )
        value = _values(low, high, place, BITS, ZERO, TABLE).to(tl.float32) * scale[:, None]
        if MINS:
            value -= least[:, None]
        column = block * _BLOCK + place * _LANES + lane
        target = out + row[:, None].to(tl.int64) * columns + column[None, :]
        tl.store(target, value.to(out.dtype.element_ty), mask=kept[:, None] & (column < columns)[None, :])
