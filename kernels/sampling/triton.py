# pyrefly: ignore-errors
"""The kernels; `device` starts them and says what they do.

All sums are of integers, so neither the order nor the number of the programs that add them up changes a bit.

A logit x of a row whose highest is h lies at the distance t = (h - x) / temperature * log2(e), an integer in units of
2^-44, 63 at most. Its weight 2^-t is an integer in units of 2^-ONE, and 0 at the distance 63.
"""

import triton
import triton.language as tl

_UNIT: tl.constexpr = tl.constexpr(44)
"""Of a distance: 2^-44."""
_FARTHEST: tl.constexpr = tl.constexpr(63 << 44)
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_BINS: tl.constexpr = tl.constexpr(32)
_BIN_BITS: tl.constexpr = tl.constexpr(5)
_NEAR: tl.constexpr = tl.constexpr(42)
"""log2 of a bin's width where a search begins: a quarter, so that 32 reach to weights of 1/256 of the highest."""
_FAR: tl.constexpr = tl.constexpr(45)
"""And where it goes on beyond them: 2."""
_LEVELS: tl.constexpr = tl.constexpr(32)
"""Histograms of a row. A search takes 11 at most: near, far, and 45 bits in steps of 5."""
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


@triton.jit
def adjust(
    logits_ptr, floats_ptr, ints_ptr, V, logits_stride, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Penalties, then bias, on the logits [CHUNK * program_id(0), + CHUNK) of row program_id(1), in place."""
    row = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0) * CHUNK
    end = tl.minimum(begin + CHUNK, V)
    floats_ptr += row * _WIDTH
    ints_ptr += row * _WIDTH
    logits_ptr += row * logits_stride
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


@triton.jit(do_not_specialize=["parts"])
def draw(
    logits_ptr, floats_ptr, ints_ptr, tokens_ptr, work_ptr, V, logits_stride, work_stride, parts, chunk,
    ONE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The token of row program_id(1), by `parts` programs, of which program_id(0) looks at `chunk` logits.

    They wait for each other, so all must run at once. work_ptr, of a row: how many programs have arrived, 16 words;
    what each of them found, 2 * PARTS; histograms. The first word is 0 before and after."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    begin = part * chunk
    end = tl.minimum(begin + chunk, V)
    floats_ptr += row * _WIDTH
    ints_ptr += row * _WIDTH
    logits_ptr += row * logits_stride
    tokens_ptr += row
    arrived_ptr = work_ptr + row * work_stride
    found_ptr = arrived_ptr + 16
    masses_ptr = found_ptr + PARTS
    bins_ptr = masses_ptr + PARTS

    top_k = tl.load(ints_ptr + _TOP_K)
    if top_k < 0:
        if part == 0:
            tl.store(tokens_ptr, 0)
        return
    temperature = tl.load(floats_ptr + _TEMPERATURE)

    best = tl.full((BLOCK,), -0x8000000000000000, tl.int64)
    for start in tl.range(begin, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + ids, mask=ids < end, other=float("-inf"))
        best = tl.maximum(best, (_ordered(x).to(tl.int64) << 32) | (ids ^ _LOW).to(tl.int64))
    tl.store(found_ptr + part, tl.max(best, 0))
    if (part == 0) & (temperature > 0):
        tl.store(bins_ptr + tl.arange(0, _LEVELS * _BINS), tl.zeros((_LEVELS * _BINS,), tl.int64))
    tl.debug_barrier()  # all stores of the program before the one thread that announces them
    before = tl.atomic_add(arrived_ptr, 1, sem="acq_rel")

    if temperature > 0:
        goal = tl.full((), 0, tl.int64) + parts
        while tl.atomic_add(arrived_ptr, 0, sem="acq_rel") < goal:
            pass
        highest, sound, token = _highest(found_ptr, parts, PARTS)
        if sound:
            scale = tl.full((), _LOG2_E, tl.float64) * 17592186044416.0 / temperature
            first = highest.to(tl.float64)
            limit = tl.full((), _FARTHEST, tl.int64)
            level = 0
            for stage in tl.range(0, 2):  # top_k, then top_p of what is left
                counting = stage == 0
                target = tl.full((), 0, tl.int64)
                if counting:
                    if (top_k > 0) & (top_k < V):
                        target = top_k
                else:
                    top_p = tl.load(floats_ptr + _TOP_P)
                    if top_p < 1:
                        mass = tl.zeros((BLOCK,), tl.int64)
                        for start in tl.range(begin, end, BLOCK):
                            t, weight = _weights(logits_ptr, start, end, first, scale, ONE, BLOCK)
                            mass += tl.where(t <= limit, weight, 0)
                        tl.store(masses_ptr + part, tl.sum(mass, 0))
                        goal = _meet(arrived_ptr, goal, parts)
                        total = tl.sum(_of_parts(masses_ptr, parts, PARTS), 0)
                        target = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
                        target = tl.minimum(tl.maximum(target, 1), total)
                # The least border with `target` tokens, or so much mass, up to it: bins, then bins of the bin it is in.
                low = tl.full((), 0, tl.int64)
                below = tl.full((), 0, tl.int64)
                shift = tl.full((), _NEAR, tl.int64)
                searching = target > 0
                while searching:
                    held = tl.zeros((_BINS,), tl.int64)
                    beyond = low + (1 << (shift + _BIN_BITS))
                    for start in tl.range(begin, end, BLOCK):
                        far = _distances(logits_ptr, start, end, first, scale, BLOCK)
                        # Mostly there is none, and where there is, few at once fit into the registers.
                        if tl.max(((far >= low) & (far < beyond) & (far <= limit)).to(tl.int32), 0) > 0:
                            for few in tl.range(start, tl.minimum(start + BLOCK, end), FEW):
                                near, light = _weights(logits_ptr, few, end, first, scale, ONE, FEW)
                                inside = (near >= low) & (near < beyond) & (near <= limit)
                                place = tl.where(inside, (near - low) >> shift, -1).to(tl.int32)
                                worth = tl.where(counting, 1, light)
                                at = place[:, None] == tl.arange(0, _BINS)[None, :]
                                held += tl.sum(tl.where(at, worth[:, None], 0), 0)
                    spots = bins_ptr + level * _BINS + tl.arange(0, _BINS)
                    tl.atomic_add(spots, held, mask=held != 0, sem="relaxed")
                    goal = _meet(arrived_ptr, goal, parts)
                    held = tl.load(spots, cache_modifier=".cg")
                    short = below + tl.cumsum(held, 0) < target
                    bin = tl.sum(short.to(tl.int64), 0)
                    below += tl.sum(tl.where(short, held, 0), 0)
                    low += bin << shift
                    level += 1
                    if bin == _BINS:
                        shift = tl.full((), _FAR, tl.int64)
                    else:
                        last = low + (1 << shift) - 1
                        inner = tl.sum(tl.where(tl.arange(0, _BINS) == bin, held, 0), 0)
                        least = tl.where(counting, 1, _weight(last, ONE))
                        # Two tokens in a bin have twice the least weight there, but for rounding.
                        if (shift == 0) | (2 * inner < 3 * least):
                            limit = tl.minimum(limit, last)
                            searching = False
                        shift = tl.maximum(shift - _BIN_BITS, 0)

            min_p = tl.minimum(tl.load(floats_ptr + _MIN_P), 1.0)
            lightest = tl.ceil(min_p * (1 << ONE)).to(tl.int64)
            mass = tl.zeros((BLOCK,), tl.int64)
            for start in tl.range(begin, end, BLOCK):
                mass += _kept(logits_ptr, start, end, first, scale, limit, lightest, ONE, BLOCK)
            tl.store(masses_ptr + part, tl.sum(mass, 0))
            goal = _meet(arrived_ptr, goal, parts)
            masses = _of_parts(masses_ptr, parts, PARTS)
            total = tl.sum(masses, 0)
            target = (tl.load(floats_ptr + _UNIFORM) * total.to(tl.float64)).to(tl.int64)
            target = tl.minimum(target, total - 1)
            after = tl.sum(tl.where(tl.arange(0, PARTS) < part, masses, 0), 0)
            mine = tl.sum(tl.where(tl.arange(0, PARTS) == part, masses, 0), 0)
            if (after <= target) & (target < after + mine):
                start = begin
                token = tl.full((), -1, tl.int32)
                while (token < 0) & (start < end):
                    weight = _kept(logits_ptr, start, end, first, scale, limit, lightest, ONE, BLOCK)
                    held = tl.sum(weight, 0)
                    if target < after + held:
                        ids = start + tl.arange(0, BLOCK)
                        over = after + tl.cumsum(weight, 0) > target
                        token = tl.min(tl.where(over, ids, _LOW), 0)
                    after += held
                    start += BLOCK
                _end(token, tokens_ptr, ints_ptr)
        else:
            if part == 0:
                tl.store(tokens_ptr, -1)
        tl.debug_barrier()  # all reads of the program before it says that it needs nothing more
        before = tl.atomic_add(arrived_ptr, 1, sem="acq_rel")
        if before == goal + parts - 1:
            tl.store(arrived_ptr, 0)
    else:
        if before == parts - 1:
            highest, sound, token = _highest(found_ptr, parts, PARTS)
            if sound:
                _end(token, tokens_ptr, ints_ptr)
            else:
                tl.store(tokens_ptr, -1)
            tl.store(arrived_ptr, 0)


@triton.jit
def _ordered(x):
    """float32 -> int32 in the same order; both zeros are one, and NaN is infinite."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & _LOW)
    return tl.where(x != x, _INFINITE, bits)


@triton.jit
def _highest(found_ptr, parts, PARTS: tl.constexpr):
    """Highest logit of a row, whether it is finite, and the lowest id that has it."""
    n = tl.arange(0, PARTS)
    found = tl.load(found_ptr + n, mask=n < parts, other=-0x8000000000000000, cache_modifier=".cg")
    best = tl.max(found, 0)
    key = (best >> 32).to(tl.int32)
    highest = (key ^ ((key >> 31) & _LOW)).to(tl.float32, bitcast=True)
    sound = (highest < float("inf")) & (highest > float("-inf"))
    return highest, sound, ((best & 0xFFFFFFFF) ^ _LOW).to(tl.int32)


@triton.jit
def _meet(arrived_ptr, goal, parts):
    """Wait until all programs of the row are here; what they stored and added before is there then."""
    goal += parts
    tl.debug_barrier()
    tl.atomic_add(arrived_ptr, 1, sem="acq_rel")
    while tl.atomic_add(arrived_ptr, 0, sem="acq_rel") < goal:
        pass
    return goal


@triton.jit
def _of_parts(pointer, parts, PARTS: tl.constexpr):
    n = tl.arange(0, PARTS)
    return tl.load(pointer + n, mask=n < parts, other=0, cache_modifier=".cg")


@triton.jit
def _distances(logits_ptr, start, end, first, scale, BLOCK: tl.constexpr):
    """int64 [BLOCK], beyond all others behind `end`."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + ids, mask=ids < end, other=float("-inf"))
    d = first - x.to(tl.float64)
    # Where `scale` is infinite, 0 times it would be none.
    t = tl.where(d > 0, tl.minimum(d * scale, 63.0 * 17592186044416.0), 0.0).to(tl.int64)
    return tl.where(ids < end, t, 1 << 60)


@triton.jit
def _weights(logits_ptr, start, end, first, scale, ONE: tl.constexpr, BLOCK: tl.constexpr):
    """int64 [BLOCK] each: distances, and their weights."""
    t = _distances(logits_ptr, start, end, first, scale, BLOCK)
    return t, _weight(tl.minimum(t, _FARTHEST), ONE)


@triton.jit
def _weight(t, ONE: tl.constexpr):
    """2^-t in units of 2^-ONE, to 2^-30 of itself and one unit: Chebyshev's interpolation of degree 7 on [0, 1], which
    is 3e-11 off, in fixed point."""
    f = (t >> (_UNIT - 31)) & _LOW
    p = 316243 + ((f * -23239) >> 31)
    p = -2851416 + ((f * p) >> 31)
    p = 20649271 + ((f * p) >> 31)
    p = -119192779 + ((f * p) >> 31)
    p = 515882323 + ((f * p) >> 31)
    p = -1488522228 + ((f * p) >> 31)
    p = 2147483648 + ((f * p) >> 31)
    return (p << (ONE - 31)) >> (t >> _UNIT)


@triton.jit
def _kept(logits_ptr, start, end, first, scale, limit, lightest, ONE: tl.constexpr, BLOCK: tl.constexpr):
    """int64 [BLOCK]: weights, 0 where a token must not be drawn."""
    t, weight = _weights(logits_ptr, start, end, first, scale, ONE, BLOCK)
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
