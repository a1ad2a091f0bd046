# pyrefly: ignore-errors
"""The kernels; `device` starts them and says what they do.

All sums are of integers, so neither the order nor the number of the programs that add them up changes a bit.

A logit x of a row whose highest is h lies at the distance t = (h - x) / temperature * log2(e), an integer in units of
2^-44, 63 at most. Its weight 2^-t is an integer in units of 2^-ONE, and 0 at the distance 63.

A row's words in the workspace: how many programs have arrived, 16 words; of each segment of the vocabulary, its highest
logit, SEGMENTS words; three times what the programs or segments weigh, SEGMENTS each; three histograms, used in turn.
`adjust` leaves them as `draw` wants them, whatever they held.
"""

import triton
import triton.language as tl

_UNIT: tl.constexpr = tl.constexpr(44)
"""Of a distance: 2^-44."""
_FARTHEST: tl.constexpr = tl.constexpr(63 << 44)
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_STEEPEST: tl.constexpr = tl.constexpr(2.0**1000)
"""Of the factor from logits to distances: no infinity, which times 0 is none, and beyond `_FARTHEST` in one step of
any float32."""
_BINS: tl.constexpr = tl.constexpr(2048)
_BIN_BITS: tl.constexpr = tl.constexpr(11)
_NEAR: tl.constexpr = tl.constexpr(37)
"""log2 of a bin's width where a search begins: all bins reach to the distance 16."""
_FAR: tl.constexpr = tl.constexpr(39)
"""And where it goes on beyond them: to 80, which is all."""
_TABLES: tl.constexpr = tl.constexpr(3)
_HEAD: tl.constexpr = tl.constexpr(16)
_CLEARED: tl.constexpr = tl.constexpr(256)
"""Words that a program sets to 0 at once."""
_INFINITE: tl.constexpr = tl.constexpr(0x7F800000)
_LOW: tl.constexpr = tl.constexpr(0x7FFFFFFF)
_COUNT: tl.constexpr = tl.constexpr(0x7FFF)

# A row of parameters, see `table`.
_WIDTH: tl.constexpr = tl.constexpr(8)
_TEMPERATURE: tl.constexpr = tl.constexpr(0)
_TOP_P: tl.constexpr = tl.constexpr(1)
_MIN_P: tl.constexpr = tl.constexpr(2)
_UNIFORM: tl.constexpr = tl.constexpr(3)
_REPETITION: tl.constexpr = tl.constexpr(4)
_PRESENCE: tl.constexpr = tl.constexpr(5)
_FREQUENCY: tl.constexpr = tl.constexpr(6)
_TOP_K: tl.constexpr = tl.constexpr(0)
_CELLS: tl.constexpr = tl.constexpr(1)
_BIAS_IDS: tl.constexpr = tl.constexpr(2)
_BIAS: tl.constexpr = tl.constexpr(3)
_BIASED: tl.constexpr = tl.constexpr(4)


@triton.jit(do_not_specialize=["span"])
def adjust(
    logits_ptr, floats_ptr, ints_ptr, work_ptr, V, logits_stride, work_stride, span,
    SEGMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Penalties, then bias, on segment program_id(0) of row program_id(1): `span` blocks of logits, in place; then the
    highest of them. All segments of a row together also make its words ready for `draw`."""
    segment = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    begin = segment * span * BLOCK
    end = tl.minimum(begin + span * BLOCK, V)
    floats_ptr += row * _WIDTH
    ints_ptr += row * _WIDTH
    logits_ptr += row * logits_stride
    work_ptr += row * work_stride
    if tl.load(ints_ptr + _TOP_K) < 0:
        return
    address = tl.load(ints_ptr + _CELLS)
    biased = tl.load(ints_ptr + _BIASED)
    if address != 0:
        cells_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.int16)), 16)
        repetition = tl.load(floats_ptr + _REPETITION).to(tl.float32)
        presence = tl.load(floats_ptr + _PRESENCE).to(tl.float32)
        frequency = tl.load(floats_ptr + _FREQUENCY).to(tl.float32)
        for start in tl.range(begin, end, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            inside = ids < end
            cells = tl.load(cells_ptr + ids, mask=inside, other=0).to(tl.int32)
            if tl.max((cells != 0).to(tl.int32), 0) > 0:
                x = tl.load(logits_ptr + ids, mask=inside & (cells != 0), other=0.0)
                factor = tl.full((BLOCK,), 1.0, tl.float32) * repetition
                x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
                count = cells & _COUNT
                x = tl.where(count > 0, x - (presence + frequency * count.to(tl.float32)), x)
                tl.store(logits_ptr + ids, x, mask=inside & (cells != 0))
    if biased > 0:
        ids_ptr = tl.load(ints_ptr + _BIAS_IDS).to(tl.pointer_type(tl.int64))
        bias_ptr = tl.load(ints_ptr + _BIAS).to(tl.pointer_type(tl.float32))
        tl.debug_barrier()  # what other threads of the program have stored above
        for first in tl.range(0, biased.to(tl.int32), BLOCK):
            entries = first + tl.arange(0, BLOCK)
            ids = tl.load(ids_ptr + entries, mask=entries < biased, other=-1)
            here = (ids >= begin) & (ids < end)
            x = tl.load(logits_ptr + ids, mask=here, other=0.0)
            bias = tl.load(bias_ptr + entries, mask=here, other=0.0)
            tl.store(logits_ptr + ids, x + bias, mask=here)
    if (address != 0) | (biased > 0):
        tl.debug_barrier()
    best = tl.full((BLOCK,), -0x8000000000000000, tl.int64)
    for start in tl.range(begin, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + ids, mask=ids < end, other=float("-inf"))
        best = tl.maximum(best, (_ordered(x).to(tl.int64) << 32) | (ids ^ _LOW).to(tl.int64))
    tl.store(work_ptr + _HEAD + segment, tl.max(best, 0))
    if tl.load(floats_ptr + _TEMPERATURE) > 0:
        if segment == 0:
            tl.store(work_ptr, 0)
        _clear(work_ptr + _HEAD + 4 * SEGMENTS, segment, tl.num_programs(0), _TABLES * _BINS)


@triton.jit(do_not_specialize=["step", "segments", "span", "parts", "each"])
def draw(
    logits_ptr, floats_ptr, ints_ptr, tokens_ptr, work_ptr, V, logits_stride, work_stride, step, segments, span, parts,
    each, ONE: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token of row program_id(1), by `parts` programs, of which program_id(0) looks at `each` segments.

    They wait for each other, so all must run at once. `adjust` has run, with the same segments. step: 1, from a logit
    to the next; the compiler must not know, or a thread would hold logits that lie together, and all that goes to the
    histograms would change threads first."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    begin = part * each * span * BLOCK
    end = tl.minimum(begin + each * span * BLOCK, V)
    floats_ptr += row * _WIDTH
    ints_ptr += row * _WIDTH
    logits_ptr += row * logits_stride
    tokens_ptr += row
    arrived_ptr = work_ptr + row * work_stride
    found_ptr = arrived_ptr + _HEAD
    masses_ptr = found_ptr + SEGMENTS
    tables_ptr = masses_ptr + 3 * SEGMENTS

    top_k = tl.load(ints_ptr + _TOP_K)
    temperature = tl.load(floats_ptr + _TEMPERATURE)
    if top_k < 0:
        if part == 0:
            tl.store(tokens_ptr, 0)
        return
    if (temperature == 0) & (part > 0):
        return
    highest, sound, token = _highest(found_ptr, segments, SEGMENTS)
    if sound:
        if temperature == 0:
            _end(token, tokens_ptr, ints_ptr)
        else:
            scale = tl.minimum(tl.full((), _LOG2_E, tl.float64) * 17592186044416.0 / temperature, _STEEPEST)
            first = highest.to(tl.float64)
            top_p = tl.load(floats_ptr + _TOP_P)
            limit = tl.full((), _FARTHEST, tl.int64)
            goal = tl.full((), 0, tl.int64)
            level = 0
            for stage in tl.range(0, 2):  # top_k, then top_p of what is left
                counting = stage == 0
                # The least border with `target` tokens, or so much mass, up to it: bins, then bins of the bin it is in.
                target = tl.full((), 0, tl.int64)
                low = tl.full((), 0, tl.int64)
                below = tl.full((), 0, tl.int64)
                shift = tl.full((), _NEAR, tl.int64)
                searching = tl.where(counting, (top_k > 0) & (top_k < V), top_p < 1)
                while searching:
                    bins_ptr = tables_ptr + level % _TABLES * _BINS
                    mass = _sort(
                        bins_ptr, logits_ptr, begin, end, step, first, scale, limit, low, shift, counting, ONE, BLOCK
                    )
                    if target == 0:
                        tl.store(masses_ptr + stage * SEGMENTS + part, tl.sum(mass, 0))
                    goal = _meet(arrived_ptr, goal, parts)
                    if level > 0:  # nobody reads those any more, and nobody adds to them before the next meeting
                        _clear(tables_ptr + (level - 1) % _TABLES * _BINS, part, parts, _BINS)
                    if target == 0:
                        total = tl.sum(_words(masses_ptr + stage * SEGMENTS, parts, SEGMENTS), 0)
                        share = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
                        target = tl.minimum(tl.maximum(tl.where(counting, top_k, share), 1), total)
                    held = tl.load(bins_ptr + tl.arange(0, _BINS), cache_modifier=".cg")
                    short = below + tl.cumsum(held, 0) < target
                    border = tl.sum(short.to(tl.int32), 0)
                    below += tl.sum(tl.where(short, held, 0), 0)
                    low += border.to(tl.int64) << shift
                    level += 1
                    if border == _BINS:
                        shift = tl.full((), _FAR, tl.int64)
                    else:
                        last = low + (1 << shift) - 1
                        inner = tl.sum(tl.where(tl.arange(0, _BINS) == border, held, 0), 0)
                        # Two tokens in a bin have twice the least weight there, but for rounding.
                        single = 2 * inner < 3 * tl.where(counting, 1, _weight(last, ONE))
                        if single | (shift == 0) | _equal(low, last, shift, first * scale):
                            limit = tl.minimum(limit, last)
                            searching = False
                        shift = tl.maximum(shift - _BIN_BITS, 0)

            min_p = tl.minimum(tl.load(floats_ptr + _MIN_P), 1.0)
            lightest = tl.ceil(min_p * (1 << ONE)).to(tl.int64)
            masses_ptr += 2 * SEGMENTS
            for segment in tl.range(part * each, tl.minimum(part * each + each, segments)):
                mass = tl.zeros((BLOCK,), tl.int64)
                for start in tl.range(segment * span * BLOCK, tl.minimum((segment + 1) * span * BLOCK, end), BLOCK):
                    mass += _kept(logits_ptr, start, end, step, first, scale, limit, lightest, ONE, BLOCK)
                tl.store(masses_ptr + segment, tl.sum(mass, 0))
            goal = _meet(arrived_ptr, goal, parts)
            masses = _words(masses_ptr, segments, SEGMENTS)
            total = tl.sum(masses, 0)
            target = (tl.load(floats_ptr + _UNIFORM) * total.to(tl.float64)).to(tl.int64)
            target = tl.minimum(target, total - 1)
            passed = tl.cumsum(masses, 0) <= target
            after = tl.sum(tl.where(passed, masses, 0), 0)
            segment = tl.sum(passed.to(tl.int32), 0)
            if segment // each == part:
                start = segment * span * BLOCK
                token = tl.full((), -1, tl.int32)
                while (token < 0) & (start < end):
                    weight = _kept(logits_ptr, start, end, step, first, scale, limit, lightest, ONE, BLOCK)
                    ids = start + tl.arange(0, BLOCK)
                    over = tl.min(tl.where(after + tl.cumsum(weight, 0) > target, ids, _LOW), 0)
                    token = tl.where(over < _LOW, over, -1)
                    after += tl.sum(weight, 0)
                    start += BLOCK
                _end(token, tokens_ptr, ints_ptr)
    else:
        if part == 0:
            tl.store(tokens_ptr, -1)


@triton.jit
def _ordered(x):
    """float32 -> int32 in the same order; both zeros are one, and NaN is infinite."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & _LOW)
    return tl.where(x != x, _INFINITE, bits)


@triton.jit
def _clear(words_ptr, part, parts, WORDS: tl.constexpr):
    """The share of program `part` of so many zeros."""
    for start in tl.range(part * _CLEARED, WORDS, parts * _CLEARED):
        tl.store(words_ptr + start + tl.arange(0, _CLEARED), tl.zeros((_CLEARED,), tl.int64))


@triton.jit
def _highest(found_ptr, segments, SEGMENTS: tl.constexpr):
    """Highest logit of a row, whether it is finite, and the lowest id that has it."""
    n = tl.arange(0, SEGMENTS)
    best = tl.max(tl.load(found_ptr + n, mask=n < segments, other=-0x8000000000000000), 0)
    key = (best >> 32).to(tl.int32)
    highest = (key ^ ((key >> 31) & _LOW)).to(tl.float32, bitcast=True)
    sound = (highest < float("inf")) & (highest > float("-inf"))
    return highest, sound, ((best & 0xFFFFFFFF) ^ _LOW).to(tl.int32)


@triton.jit
def _meet(arrived_ptr, goal, parts):
    """Wait until all programs of the row are here; what they stored and added before is there then."""
    goal += parts
    tl.debug_barrier()  # all stores of the program before the one thread that announces them
    tl.atomic_add(arrived_ptr, 1, sem="release")
    while tl.atomic_add(arrived_ptr, 0, sem="acquire") < goal:
        pass
    return goal


@triton.jit
def _words(pointer, count, WORDS: tl.constexpr):
    """int64 [WORDS], 0 behind the first `count`. From where all multiprocessors see them."""
    n = tl.arange(0, WORDS)
    return tl.load(pointer + n, mask=n < count, other=0, cache_modifier=".cg")


@triton.jit
def _equal(low, last, shift, top):
    """Whether logits at distances of low .. last, 2^shift of them, must be equal. top: the distance of the highest
    from 0, with its sign.

    Two float32 of magnitude a or more differ by more than a * 2^-24. Twice that leaves room for what distances round.
    """
    upper = top - low.to(tl.float64)
    lower = top - (last + 1).to(tl.float64)
    nearest = tl.maximum(lower, -upper)  # to 0, and negative where it lies between them
    return nearest >= ((1 << shift) * 33554432).to(tl.float64)


@triton.jit
def _weights(logits_ptr, start, end, step, first, scale, ONE: tl.constexpr, BLOCK: tl.constexpr):
    """int64 [BLOCK] each: distances, and their weights. Behind `end`, those of -inf."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + ids * step, mask=ids < end, other=float("-inf"))
    t = tl.minimum((first - x.to(tl.float64)) * scale, 63.0 * 17592186044416.0).to(tl.int64)
    return t, _weight(t, ONE)


@triton.jit
def _weight(t, ONE: tl.constexpr):
    """2^-t in units of 2^-ONE, to 2^-29 of itself and one unit: Chebyshev's interpolation of degree 7 on [0, 1], which
    is 3e-11 off, in fixed point of 32 bits."""
    f = (t >> (_UNIT - 32)).to(tl.uint32)
    p = 632486 - tl.umulhi(f, f * 0 + 46477)
    p = 5702831 - tl.umulhi(f, p)
    p = 41298541 - tl.umulhi(f, p)
    p = 238385558 - tl.umulhi(f, p)
    p = 1031764646 - tl.umulhi(f, p)
    p = 2977044455 - tl.umulhi(f, p)
    whole = 0x100000000 - tl.umulhi(f, p).to(tl.int64)
    return (whole << (ONE - 32)) >> (t >> _UNIT)


@triton.jit
def _sort(
    bins_ptr, logits_ptr, begin, end, step, first, scale, limit, low, shift, counting,
    ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add to bins of 2^shift from `low` the tokens in them, up to `limit`: each 1, or its weight. int64 [BLOCK], which
    add up to what all tokens up to `limit` are worth, in a bin or not."""
    mass = tl.zeros((BLOCK,), tl.int64)
    for start in tl.range(begin, end, BLOCK):
        t, weight = _weights(logits_ptr, start, end, step, first, scale, ONE, BLOCK)
        bin = (t - low) >> shift
        counts = (t <= limit) & (weight > 0)
        worth = tl.where(counting, 1, weight)
        tl.atomic_add(bins_ptr + bin, worth, mask=counts & (bin.to(tl.uint64) < _BINS), sem="relaxed")
        mass += tl.where(counts, worth, 0)
    return mass


@triton.jit
def _kept(logits_ptr, start, end, step, first, scale, limit, lightest, ONE: tl.constexpr, BLOCK: tl.constexpr):
    """int64 [BLOCK]: weights, 0 where a token must not be drawn."""
    t, weight = _weights(logits_ptr, start, end, step, first, scale, ONE, BLOCK)
    return tl.where((t <= limit) & (weight >= lightest), weight, 0)


@triton.jit
def _end(token, tokens_ptr, ints_ptr):
    """Write the token, and count it where the row's tokens are counted."""
    tl.store(tokens_ptr, token.to(tl.int64))
    address = tl.load(ints_ptr + _CELLS)
    if address != 0:
        cell_ptr = address.to(tl.pointer_type(tl.int16)) + token
        cell = tl.load(cell_ptr).to(tl.int32)
        cell = tl.where((cell & _COUNT) == _COUNT, cell, cell + 1)
        tl.store(cell_ptr, cell.to(tl.int16))
