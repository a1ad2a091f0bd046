# pyrefly: ignore-errors
"""The kernels; `decode` and `prefill` start them and say what they do.

A tile of queries holds some positions times the query heads that share a K/V head, so that these read K and V once.
Scores are kept in units of log2: `scale` has the factor log2(e) in it.

K and V are plain: keys and values point to pages, or with TMA they are tensor descriptors of the pool
(`tiles.plain_tile`), and `page_stride` counts rows of them. Coded pages are read by `coded.decode`, and `expand`
makes plain ones of them for `prefill`. ROTATED: K and V were, and `coded.decode` has rotated the queries, so `combine`
must rotate the output.
"""

import triton
import triton.language as tl

from kernels.attention.tiles import plain_tile, signs

_NOTHING = tl.constexpr(-1.0e30)
"""Below every score, yet finite: a query that sees no token of a tile gets weights of 0 there, not NaN."""


@triton.jit
def split_count(pages, splits, LEAST: tl.constexpr):
    """Of a sequence: by its own length alone, so that its result does not depend on its neighbours."""
    return tl.minimum(splits, (pages + LEAST - 1) // LEAST)


@triton.jit(do_not_specialize=["table_stride", "blocks", "splits"])
def decode(
    q_ptr, keys, values, partial_ptr, weight_ptr, first_ptr, count_ptr, context_ptr, table_ptr, scale, q_row_stride,
    q_head_stride, page_stride, token_stride, head_stride, table_stride, blocks, splits,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LEAST: tl.constexpr,
    STAGES: tl.constexpr, WIDE: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of plain pages. Grid (splits * blocks, kv_heads, sequences). partial [T, heads, splits, D]: the attention to the
    tokens of one split alone; weight [T, heads, splits]: log2 of the sum of their exponentials."""
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

    m = block * BM + tl.arange(0, BM)
    row = tl.load(first_ptr + sequence).to(tl.int64) + m // GROUP
    head = kv_head * GROUP + m % GROUP
    asked = m < count * GROUP
    q = _queries(q_ptr, row, head, asked, q_row_stride, q_head_stride, D, WIDE)
    position = tl.minimum(context - count + m // GROUP, context - 1)
    table_ptr += sequence.to(tl.int64) * table_stride
    first = split * pages // parts * (PAGE // BN)
    last = tl.minimum((split + 1) * pages // parts * (PAGE // BN), (context + BN - 1) // BN)
    seen_by_all = tl.minimum(tl.maximum((context - count + 1) // BN, first), last)
    acc = tl.zeros((BM, D), tl.float32)
    peak = tl.full((BM,), _NOTHING, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc, peak, total = _attend(
        q, acc, peak, total, first, seen_by_all, last, position, context, keys, values, table_ptr, kv_head, scale,
        page_stride, token_stride, head_stride, BM, D, PAGE, BN, STAGES, WIDE, TMA, True, False,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    place = (row * (tl.num_programs(1) * GROUP) + head) * splits + split
    tl.store(weight_ptr + place, peak + tl.log2(total), mask=asked)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]  # the split may lie behind a query altogether
    tl.store(partial_ptr + place[:, None] * D + tl.arange(0, D)[None, :], acc, mask=asked[:, None])


@triton.jit(do_not_specialize=["heads", "splits"])
def combine(
    partial_ptr, weight_ptr, first_ptr, count_ptr, context_ptr, out_ptr, heads, out_row_stride, out_head_stride, splits,
    D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    CHUNK: tl.constexpr, ROTATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (D / BD, rows * heads, sequences): out [T, heads, D], the splits weighted and added in their order. MOST:
    `splits`, rounded up to a power of two."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    sequence = tl.program_id(2)
    if row >= tl.load(count_ptr + sequence):
        return
    pages = (tl.load(context_ptr + sequence) + PAGE - 1) // PAGE
    parts = split_count(pages, splits, LEAST)
    row = tl.load(first_ptr + sequence).to(tl.int64) + row
    place = (row * heads + head) * splits
    all_parts = tl.arange(0, MOST)
    weights = tl.load(weight_ptr + place + all_parts, mask=all_parts < parts, other=float("-inf"))
    peak = tl.max(weights, 0)
    whole = tl.sum(tl.exp2(weights - peak), 0)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    acc = tl.zeros((BD,), tl.float32)
    for start in tl.range(0, parts, CHUNK):
        part = start + tl.arange(0, CHUNK)
        kept = part < parts
        weight = tl.exp2(tl.load(weight_ptr + place + part, mask=kept, other=float("-inf")) - peak)
        attended = tl.load(partial_ptr + (place + part)[:, None] * D + d[None, :], mask=kept[:, None], other=0.0)
        acc += tl.sum(weight[:, None] * attended, 0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if ROTATED:
        places = tl.arange(0, BD)
        tl.static_assert(BD == 64)
        acc = tl.sum(acc[:, None] * signs(places, places), 0) / 8
    target = out_ptr + row * out_row_stride + head * out_head_stride + d
    tl.store(target, (acc / whole).to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["table_stride", "begin", "tokens"])
def prefill(
    q_ptr, keys, values, out_ptr, acc_ptr, peak_ptr, total_ptr, first_ptr, count_ptr, context_ptr, table_ptr, scale,
    q_row_stride, q_head_stride, out_row_stride, out_head_stride, page_stride, token_stride, head_stride, table_stride,
    begin, tokens,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, WIDE: tl.constexpr, TMA: tl.constexpr, EARLY: tl.constexpr, PAGED: tl.constexpr,
    CARRIED: tl.constexpr,
):  # fmt: skip
    """Grid (kv_heads, tiles of queries, sequences). Tokens [begin, begin + tokens) of each sequence, both multiples of
    PAGE, and with CARRIED those before them by what the launch for these has left: acc [T, heads, D], peak and total
    [T, heads], all float32, as `_walk` has them; so the bits are those of one launch. Out of the launch that comes to
    the last token that a tile's queries see goes its output. Without CARRIED the launch must hold all their tokens.

    With PAGED, K and V lie where the table says. Otherwise each sequence has its own tokens / PAGE pages, one behind
    the other, with this launch's tokens."""
    kv_head = tl.program_id(0)
    sequence = tl.program_id(2)
    count = tl.load(count_ptr + sequence)
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * BM  # the last tiles see most, so they begin first
    if start >= count * GROUP:
        return
    context = tl.load(context_ptr + sequence)
    past = context - count
    seen = tl.minimum(past + (start + BM - 1) // GROUP + 1, context)
    if (begin >= seen) & CARRIED:
        return
    m = start + tl.arange(0, BM)
    row = tl.load(first_ptr + sequence).to(tl.int64) + m // GROUP
    head = kv_head * GROUP + m % GROUP
    asked = m < count * GROUP
    q = _queries(q_ptr, row, head, asked, q_row_stride, q_head_stride, D, WIDE)
    position = tl.minimum(past + m // GROUP, context - 1)
    first = begin // BN
    last = ((tl.minimum(seen, begin + tokens) if CARRIED else seen) + BN - 1) // BN
    seen_by_all = tl.minimum(tl.maximum((past + start // GROUP + 1) // BN, first), last)
    if PAGED:
        table = table_ptr + sequence.to(tl.int64) * table_stride
    else:
        table = (sequence * tokens - begin) // PAGE
    place = row * (tl.num_programs(0) * GROUP) + head
    d = tl.arange(0, D)
    if CARRIED:
        carried = asked & (begin > 0)
        acc = tl.load(acc_ptr + place[:, None] * D + d[None, :], mask=carried[:, None], other=0.0)
        peak = tl.load(peak_ptr + place, mask=carried, other=_NOTHING)
        total = tl.load(total_ptr + place, mask=carried, other=0.0)
    else:
        acc = tl.zeros((BM, D), tl.float32)
        peak = tl.full((BM,), _NOTHING, tl.float32)
        total = tl.zeros((BM,), tl.float32)
    acc, peak, total = _attend(
        q, acc, peak, total, first, seen_by_all, last, position, context, keys, values, table, kv_head, scale,
        page_stride, token_stride, head_stride, BM, D, PAGE, BN, STAGES, WIDE, TMA, PAGED, EARLY,
    )  # fmt: skip
    more = False
    if CARRIED:
        more = seen > begin + tokens
    if more:
        tl.store(acc_ptr + place[:, None] * D + d[None, :], acc, mask=asked[:, None])
        tl.store(peak_ptr + place, peak, mask=asked)
        tl.store(total_ptr + place, total, mask=asked)
    else:
        target = out_ptr + (row * out_row_stride + head * out_head_stride)[:, None] + d[None, :]
        tl.store(target, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=asked[:, None])


@triton.jit
def _queries(q_ptr, row, head, asked, q_row_stride, q_head_stride, D: tl.constexpr, WIDE: tl.constexpr):
    """[BM, D], zero where nothing is asked."""
    place = (row * q_row_stride + head * q_head_stride)[:, None] + tl.arange(0, D)[None, :]
    q = tl.load(q_ptr + place, mask=asked[:, None], other=0.0)
    return q.to(tl.float32) if WIDE else q


@triton.jit
def _attend(
    q, acc, peak, total, first, seen_by_all, last, position, context, keys, values, table, kv_head, scale,
    page_stride, token_stride, head_stride, BM: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, WIDE: tl.constexpr, TMA: tl.constexpr, PAGED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Tiles [first, last) of BN tokens, of which every query sees those before `seen_by_all`."""
    acc, peak, total = _walk(
        q, acc, peak, total, first, seen_by_all, position, context, keys, values, table, kv_head, scale,
        page_stride, token_stride, head_stride, BM, D, PAGE, BN, STAGES, WIDE, TMA, PAGED, EARLY, False,
    )  # fmt: skip
    return _walk(
        q, acc, peak, total, seen_by_all, last, position, context, keys, values, table, kv_head, scale,
        page_stride, token_stride, head_stride, BM, D, PAGE, BN, STAGES, WIDE, TMA, PAGED, EARLY, True,
    )  # fmt: skip


@triton.jit
def _walk(
    q, acc, peak, total, first, last, position, context, keys, values, table, kv_head, scale, page_stride,
    token_stride, head_stride, BM: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, WIDE: tl.constexpr, TMA: tl.constexpr, PAGED: tl.constexpr, EARLY: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Tiles [first, last) of BN tokens, added to the running softmax (Dao 2023, FlashAttention-2, algorithm 1).

    q [BM, D]; acc float32 [BM, D], peak and total float32 [BM]: the sum of values, the largest score, the sum of
    weights. position int32 [BM]: the last token that each query sees. table: with PAGED where the sequence's pages are
    named, otherwise the number of its first page, those behind it following. Without MASKED each query sees all tiles.
    EARLY: V is asked for before K and both are waited for at once, so that no barrier stands between the products.
    """
    PER: tl.constexpr = PAGE // BN
    if PAGED:
        ahead = tl.load(table + first // PER, mask=first < last, other=0)
    else:
        ahead = table + first // PER
    # The masked tiles are few, and need not take more shared memory than the others.
    AHEAD: tl.constexpr = STAGES - 1 if MASKED and STAGES > 1 else STAGES
    for tile in tl.range(first, last, num_stages=AHEAD):
        page = ahead
        if PAGED:
            # A round ahead: the copies of K and V, which run ahead themselves, would wait for it.
            ahead = tl.load(table + tl.minimum(tile + 1, last - 1) // PER)
        else:
            ahead = table + (tile + 1) // PER
        start = tile % PER * BN
        token = tile * BN + tl.arange(0, BN)
        seen = token < context
        if EARLY:
            v = plain_tile(
                values, page, start, seen, kv_head, page_stride, token_stride, head_stride, BN, D, TMA, MASKED
            )
        # Scores are masked below; a descriptor reads what lies there, and nothing beside the pool.
        k = plain_tile(
            keys, page, start, seen, kv_head, page_stride, token_stride, head_stride, BN, D, TMA, MASKED and not TMA
        )
        scores = _dot(q, tl.trans(k.to(tl.float32) if WIDE else k), tl.zeros((BM, BN), tl.float32), WIDE)
        if MASKED:
            scores = tl.where(token[None, :] <= position[:, None], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        faded = tl.exp2(peak - higher)
        total = total * faded + tl.sum(weights, 1)
        acc *= faded[:, None]
        if not EARLY:
            v = plain_tile(
                values, page, start, seen, kv_head, page_stride, token_stride, head_stride, BN, D, TMA, MASKED
            )
        acc = _dot(weights if WIDE else weights.to(v.dtype), v.to(tl.float32) if WIDE else v, acc, WIDE)
        peak = higher
    return acc, peak, total


@triton.jit
def _dot(a, b, acc, WIDE: tl.constexpr):
    return tl.dot(a, b, acc, input_precision="ieee") if WIDE else tl.dot(a, b, acc)
