# pyrefly: ignore-errors
"""Attention of few queries to coded pages; `decode.decode` starts it, and `triton.combine` adds its parts.

Beside the codes' bytes it is instructions that could take the time, so the products are turned over: tokens and dims
are the rows of the left operand, which codes become in the registers where they arrive (`operands`), and queries are
the columns, eight at least instead of sixteen. A round's tokens are dealt out to SLICES, each with a softmax of its own
that waits for no other; at the end they are added.

Products are of float16 and sums of float32, also for bfloat16: codes are exact in it, each query is multiplied by a
power of two that puts its largest dim into [2^11, 2^12), and of weights what multiplies V's codes is kept below 2. K's
scales and V's stay float32, since they multiply scores and weights and not codes; but those of less than 64 dims
multiply codes, in float16.
"""

import triton
import triton.language as tl

from kernels.attention.operands import key_operand, key_order, value_operand, value_order
from kernels.attention.tiles import signs
from kernels.attention.triton import split_count

_NOTHING = tl.constexpr(-1.0e30)
"""As in `triton`."""


@triton.jit(do_not_specialize=["table_stride", "blocks", "splits"])
def decode(
    q_ptr, keys, key_scales, values, value_scales, partial_ptr, weight_ptr, first_ptr, count_ptr, context_ptr,
    table_ptr, scale, q_row_stride, q_head_stride, page_stride, table_stride, blocks, splits,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SLICES: tl.constexpr, LEAST: tl.constexpr, STAGES: tl.constexpr, KEYS: tl.constexpr, KEY_DIMS: tl.constexpr,
    VALUES: tl.constexpr, VALUE_DIMS: tl.constexpr, ASM: tl.constexpr, CVT: tl.constexpr, ROTATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid and outputs as of `triton.decode`."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    split = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    count = tl.load(count_ptr + sequence)
    context = tl.load(context_ptr + sequence)
    pages = (context + PAGE - 1) // PAGE
    parts = split_count(pages, splits, LEAST)
    if (block * BM >= count * GROUP) | (split >= parts):
        return

    TILE: tl.constexpr = BN * SLICES
    C: tl.constexpr = min(64, D)
    m = block * BM + tl.arange(0, BM)
    row = tl.load(first_ptr + sequence).to(tl.int64) + m // GROUP
    head = kv_head * GROUP + m % GROUP
    asked = m < count * GROUP
    starts = q_ptr + row * q_row_stride + head * q_head_stride
    qs, units = _queries(starts, asked, KEYS, BM, C, D, SLICES, ASM, CVT, ROTATED)
    position = tl.minimum(context - count + m // GROUP, context - 1)
    table_ptr += sequence.to(tl.int64) * table_stride
    first = split * pages // parts * (PAGE // TILE)
    last = tl.minimum((split + 1) * pages // parts * (PAGE // TILE), (context + TILE - 1) // TILE)
    acc = ()
    for _ in tl.static_range(D // C):
        acc += (tl.zeros((SLICES, C, BM), tl.float32),)
    peak = tl.full((SLICES, BM), _NOTHING, tl.float32)
    total = tl.zeros((SLICES, BM), tl.float32)
    acc, peak, total = _walk(
        qs, units * scale, acc, peak, total, first, last, position, context, keys, key_scales, values, value_scales,
        table_ptr, kv_head, page_stride, BM, C, D, PAGE, BN, SLICES, STAGES, KEYS, KEY_DIMS, VALUES, VALUE_DIMS, ASM,
        CVT,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    highest = tl.max(peak, 0)
    shares = tl.exp2(peak - highest[None, :])
    whole = tl.sum(total * shares, 0)
    place = (row * (tl.num_programs(1) * GROUP) + head) * splits + split
    tl.store(weight_ptr + place, highest + tl.log2(whole), mask=asked)
    shares = shares / tl.where(whole > 0, whole, 1.0)[None, :]  # the split may lie behind a query altogether
    for c in tl.static_range(D // C):
        attended = value_order(tl.sum(acc[c] * shares[:, None, :], 0), VALUES, C)
        target = partial_ptr + place[None, :] * D + c * C + tl.arange(0, C)[:, None]
        tl.store(target, attended, mask=asked[None, :])


@triton.jit
def _queries(
    starts, asked, KEYS: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, D: tl.constexpr, SLICES: tl.constexpr,
    ASM: tl.constexpr, CVT: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """[SLICES, C, BM] for each C dims, in the order of the key operands, and the unit float32 [BM] that they are in."""
    d = tl.arange(0, C)
    order = key_order(d, KEYS, C, ASM and CVT)
    largest = tl.zeros((BM,), tl.int32)
    for c in tl.static_range(D // C):
        q = tl.load(starts[None, :] + c * C + d[:, None], mask=asked[None, :], other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(q.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))
    exponent = tl.maximum(largest >> 23, 13)
    factor = ((265 - exponent) << 23).to(tl.float32, bitcast=True)
    unit = ((exponent - 11) << 23).to(tl.float32, bitcast=True)
    qs = ()
    for c in tl.static_range(D // C):
        place = starts[None, :] + c * C + (d if ROTATED else order)[:, None]
        q = tl.load(place, mask=asked[None, :], other=0.0).to(tl.float32) * factor[None, :]
        if ROTATED:  # at most 8 times as large
            q = _dot(signs(order, d).to(tl.float16 if ASM else tl.float32), q, tl.zeros((C, BM), tl.float32), ASM) / 8
        if ASM:
            q = q.to(tl.float16)
        qs += (tl.broadcast_to(q[None, :, :], (SLICES, C, BM)),)
    return qs, unit


@triton.jit
def _walk(
    qs, units, acc, peak, total, first, last, position, context, keys, key_scales, values, value_scales, table_ptr,
    head, page_stride, BM: tl.constexpr, C: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
    SLICES: tl.constexpr, STAGES: tl.constexpr, KEYS: tl.constexpr, KEY_DIMS: tl.constexpr, VALUES: tl.constexpr,
    VALUE_DIMS: tl.constexpr, ASM: tl.constexpr, CVT: tl.constexpr,
):  # fmt: skip
    """Rounds [first, last) of BN tokens a slice, added to the running softmax (Dao 2023, FlashAttention-2, algorithm
    1).

    units [BM]: what scores are multiplied by. acc: float32 [SLICES, C, BM] for each C dims, in the order of the value
    operands; peak and total float32 [SLICES, BM]. position int32 [BM]: the last token that each query sees.
    """
    TILE: tl.constexpr = BN * SLICES
    PER: tl.constexpr = PAGE // TILE
    KEY_GROUPS: tl.constexpr = D // KEY_DIMS
    VALUE_GROUPS: tl.constexpr = D // VALUE_DIMS
    tl.static_assert(KEY_GROUPS == 1 or KEY_DIMS <= C)
    tl.static_assert(VALUE_GROUPS == 1 or VALUE_DIMS <= C)
    # Pairs 0, 4, 1, 5, 2, 6, 3, 7 of 16 tokens: so the four lanes that read V together read neighbours, of other banks.
    slices = tl.arange(0, SLICES)[:, None] * BN
    one = slices + 2 * _dealt(tl.arange(0, BN) // 2)[None, :] + tl.arange(0, BN)[None, :] % 2
    even = slices + 2 * _dealt(tl.arange(0, BN // 2))[None, :]
    ahead = tl.load(table_ptr + first // PER, mask=first < last, other=0)
    for tile in tl.range(first, last, num_stages=STAGES):
        page = ahead
        # A round ahead: the copies of K and V, which run ahead themselves, would wait for it.
        ahead = tl.load(table_ptr + tl.minimum(tile + 1, last - 1) // PER)
        # In the place of what lies behind the sequence's end, be it NaN, its last token is read, with a weight of 0.
        end = context - 1 - tile * TILE
        start = tile % PER * TILE
        token = start + tl.minimum(one, end)
        former, latter = start + tl.minimum(even, end), start + tl.minimum(even + 1, end)
        key_words = _scale_words(key_scales, page, token, head, page_stride, KEYS, KEY_GROUPS, PAGE)
        scores = tl.zeros((SLICES, BN, BM), tl.float32)
        for c in tl.static_range(D // C):
            w = _code_words(keys, page, token, head, page_stride, c, KEYS, PAGE, C, D)
            k = key_operand(w, key_words[c if KEYS == "nvfp4" else 0], KEYS, ASM, CVT, SLICES, BN, C)
            if KEY_DIMS == C and KEY_GROUPS > 1:
                part = _dot(k, qs[c], tl.zeros((SLICES, BN, BM), tl.float32), ASM)
                scores += part * _scale(key_words, c)[:, :, None]
            else:
                scores = _dot(k, qs[c], scores, ASM)
        if KEY_GROUPS == 1:
            scores *= _scale(key_words, 0)[:, :, None]
        scores *= units[None, None, :]

        if VALUE_DIMS >= C:
            # The power of two of a token's largest scale goes on its score, so that the largest weight of all that is
            # multiplied by V's codes is about 1.
            value_words = _scale_words(value_scales, page, token, head, page_stride, VALUES, VALUE_GROUPS, PAGE)
            scales = ()
            exponent = tl.full((SLICES, BN), 102, tl.int32)  # below float16's smallest number
            for group in tl.static_range(VALUE_GROUPS):
                factor = _scale(value_words, group)
                scales += (factor,)
                exponent = tl.maximum(exponent, (factor.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> 23)
            scores += (exponent - 127).to(tl.float32)[:, :, None]
            back = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        scores = tl.where((tile * TILE + one)[:, :, None] <= position[None, None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None, :])
        faded = tl.exp2(peak - higher)
        total = total * faded + tl.sum(weights * back[:, :, None] if VALUE_DIMS >= C else weights, 1)
        p = weights
        more = ()
        for c in tl.static_range(D // C):
            if VALUE_DIMS >= C:
                if c < VALUE_GROUPS:
                    p = weights * (scales[c] * back)[:, :, None]
                scales_a, scales_b = even, even  # not used
            else:
                scales_a = _group_words(value_scales, page, former, head, page_stride, c, VALUES, PAGE, D)
                scales_b = _group_words(value_scales, page, latter, head, page_stride, c, VALUES, PAGE, D)
            a = _code_words(values, page, former, head, page_stride, c, VALUES, PAGE, C, D)
            b = _code_words(values, page, latter, head, page_stride, c, VALUES, PAGE, C, D)
            v = value_operand(a, b, scales_a, scales_b, VALUES, VALUE_DIMS, ASM, CVT, SLICES, BN, C)
            more += (_dot(v, p, acc[c] * faded[:, None, :], ASM),)
        acc = more
        peak = higher
    return acc, peak, total


@triton.jit
def _dealt(pair):
    return pair // 8 * 8 + pair % 2 * 4 + pair // 2 % 4


@triton.jit
def _code_words(
    codes_ptr, page, token, head, page_stride, c: tl.constexpr, CODEC: tl.constexpr, PAGE: tl.constexpr,
    C: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """int32 [SLICES, tokens, words of C dims], of the c-th C dims."""
    E: tl.constexpr = 4 if CODEC == "fp8" or CODEC == "int8" else 16 if CODEC == "e8x2" else 8
    first = codes_ptr.to(tl.pointer_type(tl.int32)) + page.to(tl.int64) * page_stride + (head * PAGE * D + c * C) // E
    return tl.load(first + token[:, :, None] * (D // E) + tl.arange(0, C // E)[None, None, :])


@triton.jit
def _scale_words(
    scales_ptr, page, token, head, page_stride, CODEC: tl.constexpr, GROUPS: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """int32 [SLICES, tokens] each: the words of a token's scales, one alone in the lower half. As words, since copies
    that run ahead are of 4 bytes at least."""
    BYTES: tl.constexpr = GROUPS if CODEC == "nvfp4" else 2 * GROUPS
    first = scales_ptr.to(tl.pointer_type(tl.int32)) + page.to(tl.int64) * page_stride + head * PAGE * BYTES // 4
    words = ()
    if BYTES < 4:
        tl.static_assert(BYTES == 2)
        words += (tl.load(first + token // 2) >> (token % 2 * 16),)
    else:
        for i in tl.static_range(BYTES // 4):
            words += (tl.load(first + token * (BYTES // 4) + i),)
    return words


@triton.jit
def _group_words(
    scales_ptr, page, token, head, page_stride, c: tl.constexpr, CODEC: tl.constexpr, PAGE: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """int32 [SLICES, tokens]: the scales of the c-th 64 dims, a word."""
    WORDS: tl.constexpr = D // 64
    first = scales_ptr.to(tl.pointer_type(tl.int32)) + page.to(tl.int64) * page_stride + head * PAGE * WORDS
    return tl.load(first + token * WORDS + c)


@triton.jit
def _scale(words, group: tl.constexpr):
    """float32 of a float16."""
    return (words[group // 2] >> (group % 2 * 16)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _dot(a, b, acc, ASM: tl.constexpr):
    return tl.dot(a, b.to(tl.float16), acc) if ASM else tl.dot(a, b, acc, input_precision="ieee")
