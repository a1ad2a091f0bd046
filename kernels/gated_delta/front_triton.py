# pyrefly: ignore-errors
"""The kernel; `front` starts it and says what it does."""

import triton
import triton.language as tl

from kernels.gated_delta.triton import softplus

_EPS = tl.constexpr(1e-6)


@triton.jit
def _move(x_ptr, columns_ptr, c, inside, count, x_stride, channels, PAST: tl.constexpr):
    """The columns become those behind a span of `count` rows, whose first is at x_ptr."""
    kind = columns_ptr.dtype.element_ty
    # Upwards: what a column comes from lies above it.
    for column in tl.static_range(PAST):
        at = count - PAST + column
        new = tl.load(x_ptr + at * x_stride + c, mask=inside & (at >= 0), other=0.0).to(kind)
        old = tl.load(columns_ptr + (count + column) * channels + c, mask=inside & (at < 0), other=0.0)
        tl.debug_barrier()
        tl.store(columns_ptr + column * channels + c, tl.where(at >= 0, new, old), mask=inside)
        tl.debug_barrier()


@triton.jit
def _convolve(
    x_ptr, columns_ptr, taps_ptr, out_ptr, first, block, start, count, x_stride, channels,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """COUNT heads, from head block * COUNT on, of the HEADS whose channels begin at channel `first`. ROWS rows of a
    span from its row `start` on, which lies at x_ptr and goes to out_ptr.

    Only the program with the span's first rows reads the columns, so it may write them over: with rows of x, which
    nobody writes. The sum's order, and that of all behind it, is that of `conv.triton.convolve`."""
    head = block * COUNT + tl.arange(0, COUNT)[:, None]
    d = tl.arange(0, BD)[None, :]
    inside = (head < HEADS) & (d < D)
    n = head * D + d
    c = first + n
    PAST: tl.constexpr = WIDTH - 1
    tl.static_assert(ROWS >= PAST)
    taps = ()
    for tap in tl.static_range(WIDTH):
        taps += (tl.load(taps_ptr + tap * channels + c, mask=inside, other=0.0).to(tl.float32),)
    # All loads before the first store, which no load is moved over.
    window = ()
    for row in tl.static_range(PAST):
        before = tl.load(x_ptr + (row - PAST) * x_stride + c, mask=inside & (start > 0), other=0.0)
        column = tl.load(columns_ptr + row * channels + c, mask=inside & (start == 0), other=0.0)
        window += (tl.where(start > 0, before.to(tl.float32), column.to(tl.float32)),)
    for row in tl.static_range(ROWS):
        x = tl.load(x_ptr + row * x_stride + c, mask=inside & (start + row < count), other=0.0)
        window += (x.to(tl.float32),)

    if start == 0:
        _move(x_ptr, columns_ptr, c, inside, count, x_stride, channels, PAST)

    target = out_ptr.dtype.element_ty
    for row in tl.static_range(ROWS):
        total = window[row + PAST] * taps[PAST]
        for tap in tl.static_range(PAST):
            total += window[row + tap] * taps[tap]
        result = total / (1.0 + tl.exp(-total))
        if target == tl.float16:  # by comparisons, which leave NaN what it is
            result = tl.where(result > 65504.0, 65504.0, result)
        result = result.to(target)
        if UNIT:
            wide = result.to(tl.float32)
            result = (wide * tl.rsqrt(tl.sum(wide * wide, 1) + _EPS)[:, None]).to(target)
        tl.store(out_ptr + row * (HEADS * D) + n, result, mask=inside & (start + row < count))


@triton.jit
def front(
    x_ptr, a_ptr, b_ptr, taps_ptr, a_log_ptr, bias_ptr, columns_ptr, borders_ptr, places_ptr, tokens_ptr, slots_ptr,
    qk_ptr, v_ptr, g_ptr, beta_ptr, x_stride, a_stride, b_stride, slot_stride, k_step,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BH: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Tile program_id(1) of ROWS tokens. program_id(0): some heads of q, of k, of v, and at last the gates.

    qk_ptr: q, and k k_step elements behind it. SIZE: elements of a row, a program. BK, BV, BH: the powers of two that
    K, V and HEADS fit in."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    tile = tl.program_id(1)
    span = tl.load(places_ptr + 2 * tile)
    start = tl.load(places_ptr + 2 * tile + 1) * ROWS
    border = tl.load(borders_ptr + span)
    count = tl.load(borders_ptr + span + 1) - border
    token = tl.load(tokens_ptr + border) + start
    place = border + start

    KEYS: tl.constexpr = KEY_HEADS * K
    CHANNELS: tl.constexpr = 2 * KEYS + HEADS * V
    KEY_COUNT: tl.constexpr = SIZE // BK
    VALUE_COUNT: tl.constexpr = SIZE // BV
    KEY_BLOCKS: tl.constexpr = (KEY_HEADS + KEY_COUNT - 1) // KEY_COUNT
    VALUE_BLOCKS: tl.constexpr = (HEADS + VALUE_COUNT - 1) // VALUE_COUNT
    x_ptr += token * x_stride
    columns_ptr += tl.load(slots_ptr + span) * slot_stride
    if block < 2 * KEY_BLOCKS:
        which = block // KEY_BLOCKS
        _convolve(
            x_ptr, columns_ptr, taps_ptr, qk_ptr + which * k_step + place * KEYS, which * KEYS, block % KEY_BLOCKS,
            start, count, x_stride, CHANNELS, KEY_HEADS, K, BK, KEY_COUNT, ROWS, WIDTH, UNIT,
        )  # fmt: skip
    elif block < 2 * KEY_BLOCKS + VALUE_BLOCKS:
        _convolve(
            x_ptr, columns_ptr, taps_ptr, v_ptr + place * (HEADS * V), 2 * KEYS, block - 2 * KEY_BLOCKS,
            start, count, x_stride, CHANNELS, HEADS, V, BV, VALUE_COUNT, ROWS, WIDTH, False,
        )  # fmt: skip
    else:
        head = tl.arange(0, BH)[None, :]
        row = tl.arange(0, ROWS)[:, None]
        inside = (head < HEADS) & (start + row < count)
        a = tl.load(a_ptr + (token + row) * a_stride + head, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + (token + row) * b_stride + head, mask=inside, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + head, mask=head < HEADS, other=0.0).to(tl.float32)
        negative = -tl.exp(tl.load(a_log_ptr + head, mask=head < HEADS, other=0.0).to(tl.float32))
        to = (place + row) * HEADS + head
        tl.store(g_ptr + to, negative * softplus(a + bias), mask=inside)
        tl.store(beta_ptr + to, tl.sigmoid(b), mask=inside)
