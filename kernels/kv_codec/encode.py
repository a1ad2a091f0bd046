# pyrefly: ignore-errors
"""One row of K or V to its codes and scales, for `triton.store`: the codecs' arithmetic, step by step, on `eights`.

Products and sums are each rounded to float32: the launch must keep the compiler from fusing them. Whatever chooses a
scale's size works on the bits of |x|, which as integers are ordered like the numbers, with infinity and then NaN at the
top: a maximum of floats would lose a NaN.

Sums of E8 are made pairwise: neighbours are added, then neighbours among these sums, and so on.
"""

import triton
import triton.language as tl

from kernels.kv_codec.eights import largest, row, spread, total

_INFINITY = tl.constexpr(0x7F800000)
_E4M3_NAN = tl.constexpr(0x7F)


@triton.jit
def put(xs, codes_ptr, scales_ptr, COUNT: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr):
    """Encode eight float32 [COUNT] and write them. FORMAT and the codes' type: of `store`; GROUP: dims that share a
    scale."""
    if FORMAT == "plain":
        tl.store(codes_ptr + tl.arange(0, COUNT * 8), row(xs, COUNT).to(codes_ptr.dtype.element_ty))
    else:
        GROUPS: tl.constexpr = COUNT * 8 // GROUP
        if FORMAT == "int8":
            codes, scales = _int8(xs, GROUPS, COUNT)
        elif FORMAT == "fp8":
            codes, scales = _fp8(xs, GROUPS, COUNT)
        elif FORMAT == "int4":
            codes, scales = _int4(xs, GROUPS, COUNT)
        elif FORMAT == "nvfp4":
            codes, scales = _nvfp4(xs, GROUPS, COUNT)
        elif FORMAT == "e8-4":
            codes, scales = _e8_four_bits(xs, GROUPS, COUNT)
        else:
            codes, scales = _e8_two_bits(xs, GROUPS, COUNT)
        if FORMAT == "int8" or FORMAT == "fp8":
            tl.store(codes_ptr + tl.arange(0, COUNT * 8), row(codes, COUNT).to(codes_ptr.dtype.element_ty))
        else:
            tl.store(codes_ptr + tl.arange(0, COUNT), codes.to(codes_ptr.dtype.element_ty))
        tl.store(scales_ptr + tl.arange(0, GROUPS), scales.to(scales_ptr.dtype.element_ty))


@triton.jit
def _int8(xs, GROUPS: tl.constexpr, COUNT: tl.constexpr):
    scales = (_peak(xs, GROUPS, COUNT) * (1 / 127)).to(tl.float16)
    xs = _scaled(xs, scales.to(tl.float32), GROUPS, COUNT)
    return [_round(_clamped(x, -127.0, 127.0)).to(tl.int8) for x in xs], scales


@triton.jit
def _fp8(xs, GROUPS: tl.constexpr, COUNT: tl.constexpr):
    scales = (_peak(xs, GROUPS, COUNT) * (1 / 448)).to(tl.float16)
    xs = _scaled(xs, scales.to(tl.float32), GROUPS, COUNT)
    return [_e4m3(_clamped(x, -448.0, 448.0)).to(tl.uint8) for x in xs], scales


@triton.jit
def _int4(xs, GROUPS: tl.constexpr, COUNT: tl.constexpr):
    WORDS: tl.constexpr = COUNT // GROUPS
    magnitude = _word_peak(xs)
    negative = tl.zeros_like(magnitude)
    for i in tl.static_range(7, -1, -1):
        negative = tl.where(_magnitude(xs[i]) == magnitude, (xs[i].to(tl.int32, bitcast=True) >> 31) & 1, negative)
    # Of equal ones the first: the maximum of (magnitude, the earlier word, sign), as one integer.
    word = tl.arange(0, COUNT) % WORDS
    key = (magnitude.to(tl.int64) << 8) | (((WORDS - word) << 1) | negative)
    best = tl.max(key.reshape(GROUPS, WORDS), 1)
    peak = (best >> 8).to(tl.int32).to(tl.float32, bitcast=True)
    scales = (peak * tl.where((best & 1) == 1, 0.125, -0.125)).to(tl.float16)
    xs = _scaled(xs, scales.to(tl.float32), GROUPS, COUNT)
    return _packed([_round(_clamped(x, -8.0, 7.0)).to(tl.int32) for x in xs], 4), scales


@triton.jit
def _nvfp4(xs, GROUPS: tl.constexpr, COUNT: tl.constexpr):
    peak = _peak(xs, GROUPS, COUNT)
    finite = _magnitude(peak) < _INFINITY
    scales = _e4m3(_clamped(tl.where(finite, peak, 0.0) * (1 / 6), 2.0**-9, 448.0))
    # Its value: the exponent of E4M3 is biased by 7, that of float32 by 127.
    wide = (scales << 20).to(tl.float32, bitcast=True) * 2.0**120
    xs = _scaled(xs, tl.where(finite, wide, 0.0), GROUPS, COUNT)
    return _packed([_e2m1(x) for x in xs], 4), tl.where(finite, scales, _E4M3_NAN)


@triton.jit
def _e8_four_bits(xs, GROUPS: tl.constexpr, COUNT: tl.constexpr):
    scales = (_peak(xs, GROUPS, COUNT) * 0.125).to(tl.float16)
    points, coset = _nearest(xs, scales, GROUPS, COUNT, 4)
    return _e8_word(points, coset, 4), scales


@triton.jit
def _e8_two_bits(xs, GROUPS: tl.constexpr, COUNT: tl.constexpr):
    """The best of three scales, each fitted to its points by least squares; ties: the first."""
    root_mean_square = tl.sqrt_rn(_sum_64([x * x for x in xs], COUNT) * (1 / 64))
    unit, second, third = root_mean_square * 0.75, root_mean_square * 0.95, root_mean_square * 1.15
    word = tl.zeros((COUNT,), tl.int32)
    scales, error = unit.to(tl.float16), unit
    for round in tl.range(3):  # not unrolled: it is most of the kernel
        other, other_scales, other_error = _fitted(xs, unit, GROUPS, COUNT)
        better = (other_error < error) | (round == 0)
        word = tl.where(spread(better, GROUPS, COUNT), other, word)
        scales = tl.where(better, other_scales, scales)
        error = tl.where(better, other_error, error)
        unit, second = second, third
    return word, scales


@triton.jit
def _fitted(xs, unit, GROUPS: tl.constexpr, COUNT: tl.constexpr):
    """The words [COUNT], the scales float16 [GROUPS] and the squared error [GROUPS] of the points nearest to the row in
    units of `unit`."""
    points, coset = _nearest(xs, unit.to(tl.float16), GROUPS, COUNT, 2)
    centre = coset.to(tl.float32) * 0.5 + 0.25
    values = [point.to(tl.float32) + centre for point in points]
    products = [xs[i] * values[i] for i in (0, 1, 2, 3, 4, 5, 6, 7)]
    squares = [value * value for value in values]
    scales = tl.div_rn(_sum_64(products, COUNT), _sum_64(squares, COUNT)).to(tl.float16)
    wide = spread(scales.to(tl.float32), GROUPS, COUNT)
    back = [value * wide for value in values]
    return _e8_word(points, coset, 2), scales, _sum_64(_squared_distances(xs, back), COUNT)


@triton.jit
def _nearest(xs, scales, GROUPS: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr):
    """`E8Rows.nearest`: r_i eight int32 [COUNT], the coset int32 [COUNT]."""
    xs = _scaled(xs, scales.to(tl.float32), GROUPS, COUNT)
    centred = [x - 0.25 for x in xs]
    moved = [x - 0.5 for x in centred]
    whole = _nearest_d8(centred, BITS)
    half = _nearest_d8(moved, BITS)
    coset = total(_squared_distances(moved, half)) < total(_squared_distances(centred, whole))
    points = [tl.where(coset, half[i], whole[i]).to(tl.int32) for i in (0, 1, 2, 3, 4, 5, 6, 7)]
    return points, coset.to(tl.int32)


@triton.jit
def _squared_distances(xs, ys):
    differences = [xs[i] - ys[i] for i in (0, 1, 2, 3, 4, 5, 6, 7)]
    return [difference * difference for difference in differences]


@triton.jit
def _nearest_d8(xs, BITS: tl.constexpr):
    """`E8Rows._nearest_d8`."""
    LOW: tl.constexpr = -(2.0 ** (BITS - 1))
    HIGH: tl.constexpr = 2.0 ** (BITS - 1) - 1
    xs = [_clamped(x, LOW, HIGH) for x in xs]
    near = [_round(x) for x in xs]
    rest = [xs[i] - near[i] for i in (0, 1, 2, 3, 4, 5, 6, 7)]
    size = [tl.abs(x) for x in rest]
    worst = largest(size)
    first = tl.where(size[7] == worst, 7, 8)
    for i in tl.static_range(6, -1, -1):
        first = tl.where(size[i] == worst, i, first)
    first = tl.where((total(near).to(tl.int32) & 1) == 1, first, 8)
    step = [tl.where((rest[i] > 0) | (near[i] == LOW), 1.0, -1.0) for i in (0, 1, 2, 3, 4, 5, 6, 7)]
    return [near[i] + tl.where(first == i, step[i], 0.0) for i in (0, 1, 2, 3, 4, 5, 6, 7)]


@triton.jit
def _e8_word(points, coset, BITS: tl.constexpr):
    last = (points[7] & -2) | coset
    return _packed((points[0], points[1], points[2], points[3], points[4], points[5], points[6], last), BITS)


@triton.jit
def _packed(fields, BITS: tl.constexpr):
    """Of each field the lowest bits, the first field lowest: int32 [COUNT]."""
    word = fields[0] & (2**BITS - 1)
    for i in tl.static_range(1, 8):
        word |= (fields[i] & (2**BITS - 1)) << (BITS * i)
    return word


@triton.jit
def _e4m3(x):
    """The byte of finite x in [-448, 448] as int32, to nearest, ties to even. Not by the hardware's conversion: compute
    capability 8.0 has none."""
    size = _magnitude(x)
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # Numbers below 2^-6 are multiples of 2^-9, which is the last place of floats from 2^14 on.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(size < 0x3C800000, small, normal) | sign


@triton.jit
def _e2m1(x):
    """The code as int32: ties to the even one, no negative zero."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return tl.where((x < 0) & (code > 0), code + 8, code)


@triton.jit
def _magnitude(x):
    """The bits of |x|, int32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _word_peak(xs):
    return largest([_magnitude(x) for x in xs])


@triton.jit
def _peak(xs, GROUPS: tl.constexpr, COUNT: tl.constexpr):
    """max |x| of each group, float32 [GROUPS]."""
    return tl.max(_word_peak(xs).reshape(GROUPS, COUNT // GROUPS), 1).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(xs, wide, GROUPS: tl.constexpr, COUNT: tl.constexpr):
    """`rows.scaled`. wide float32 [GROUPS]: the scales as they are stored."""
    size = _magnitude(wide)
    inverse = spread(tl.where((size > 0) & (size < _INFINITY), tl.div_rn(1.0, wide), 0.0), GROUPS, COUNT)
    return [_zero_for_nan(x * inverse) for x in xs]


@triton.jit
def _zero_for_nan(x):
    return tl.where(x == x, x, 0.0)


@triton.jit
def _clamped(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _round(x):
    """To the nearest integer, ties to even; |x| <= 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _sum_64(xs, COUNT: tl.constexpr):
    """Of each group of 64 dims: [COUNT / 8]."""
    pairs = tl.sum(total(xs).reshape(COUNT // 2, 2), 1)
    fours = tl.sum(pairs.reshape(COUNT // 4, 2), 1)
    return tl.sum(fours.reshape(COUNT // 8, 2), 1)
