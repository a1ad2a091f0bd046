# pyrefly: ignore-errors
"""The kernels; `rows` starts them and says what they do. A program has some channels to itself, so that it may write
over columns which no other one reads."""

import triton
import triton.language as tl


@triton.jit
def convolve(
    x_ptr, taps_ptr, columns_ptr, slots_ptr, tokens_ptr, counts_ptr, places_ptr, first_ptr, second_ptr, record_ptr,
    channels, split, x_stride, slot_stride, first_stride, second_stride, record_stride,
    WIDTH: tl.constexpr, BC: tl.constexpr, RECORD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row program_id(2) of sequence program_id(1). Without RECORD there is one row a sequence, and the columns move on.
    With it the columns stay, and the row's own goes to record_ptr."""
    sequence = tl.program_id(1)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    if slot < 0:
        return
    row = tl.program_id(2)
    place = sequence.to(tl.int64)
    if RECORD:
        if row >= tl.load(counts_ptr + sequence):
            return
        place = tl.load(places_ptr + sequence).to(tl.int64) + row
    if PDL:
        # What comes next may start: it reads nothing of this kernel's before it has waited for all of it.
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.load(tokens_ptr + sequence).to(tl.int64) + row
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = c < channels
    columns = columns_ptr + slot * slot_stride + c
    kind = columns_ptr.dtype.element_ty

    x = tl.load(x_ptr + token * x_stride + c, mask=inside, other=0.0).to(tl.float32)
    total = x * tl.load(taps_ptr + (WIDTH - 1) * channels + c, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH - 1):
        at = row + tap  # in the columns and the rows behind them
        past = tl.load(columns + at * channels, mask=inside & (at < WIDTH - 1), other=0.0).to(tl.float32)
        if RECORD:
            before = x_ptr + (token - (WIDTH - 1 - tap)) * x_stride + c
            given = tl.load(before, mask=inside & (at >= WIDTH - 1), other=0.0).to(kind).to(tl.float32)
            past = tl.where(at < WIDTH - 1, past, given)
        total += past * tl.load(taps_ptr + tap * channels + c, mask=inside, other=0.0).to(tl.float32)

    if RECORD:
        tl.store(record_ptr + place * record_stride + c, x.to(kind), mask=inside)
    else:
        tl.debug_barrier()
        for tap in tl.static_range(WIDTH - 2):
            moved = tl.load(columns + (tap + 1) * channels, mask=inside, other=0.0)
            tl.store(columns + tap * channels, moved, mask=inside)
            tl.debug_barrier()
        tl.store(columns + (WIDTH - 2) * channels, x.to(kind), mask=inside)

    result = total / (1.0 + tl.exp(-total))
    target = first_ptr.dtype.element_ty
    if target == tl.float16:  # by comparisons, which leave NaN what it is
        result = tl.where(result > 65504.0, 65504.0, result)
    result = result.to(target)
    tl.store(first_ptr + place * first_stride + c, result, mask=inside & (c < split))
    tl.store(second_ptr + place * second_stride + (c - split), result, mask=inside & (c >= split))


@triton.jit
def fold(
    columns_ptr, record_ptr, slots_ptr, places_ptr, accepted_ptr,
    channels, slot_stride, layer_stride, record_stride, record_layer_stride,
    WIDTH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Layer program_id(1) of sequence program_id(2)."""
    sequence = tl.program_id(2)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    accepted = tl.load(accepted_ptr + sequence)
    if slot < 0 or accepted <= 0:
        return
    layer = tl.program_id(1).to(tl.int64)
    place = tl.load(places_ptr + sequence).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = c < channels
    columns = columns_ptr + slot * slot_stride + layer * layer_stride + c
    records = record_ptr + layer * record_layer_stride + place * record_stride + c
    # Upwards: what a column comes from lies above it.
    for tap in tl.static_range(WIDTH - 1):
        at = accepted + tap
        old = tl.load(columns + at * channels, mask=inside & (at < WIDTH - 1), other=0.0)
        new = tl.load(records + (at - (WIDTH - 1)) * record_stride, mask=inside & (at >= WIDTH - 1), other=0.0)
        moved = tl.where(at < WIDTH - 1, old, new)
        tl.store(columns + tap * channels, moved, mask=inside)
        tl.debug_barrier()
