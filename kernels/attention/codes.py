# pyrefly: ignore-errors
"""Words of codes -> a tile of numbers, one function a row codec (docs/kv-formats.md says how codes lie).

w int32 [BN, words of a row]; scales float32 [BN, groups], which the codes are multiplied by if SCALED. A function
brings two codes at once, those at the same place of a word's halves, into the halves of a register as small numbers
that the product's dtype has exactly. So the columns of its tile [BN, D] are not in the order of the head's dims: a
word's first and second half take turns.

With ASM two numbers are computed at once and a scale is rounded to the product's dtype (of bfloat16 up to 0.4% off,
where the codes are 1% at best); without it (Triton's interpreter, whose bfloat16 is wrong, and float32 products) the
same bits are split to float32. HALF: the product's dtype is float16, else bfloat16 or float32; where a docstring names
two numbers, the one in brackets is float16's.
"""

import triton
import triton.language as tl


@triton.jit
def fp8_tile(
    w, scales, SCALED: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Exponent and mantissa to where the dtype has them: 2^-120 (2^-8) of the value, also of subnormals."""
    if HALF:
        even = ((w << 8) & _both(0x8000)) | ((w << 7) & _both(0x3F80))
        odd = (w & _both(0x8000)) | ((w >> 1) & _both(0x3F80))
        back = _both(0x5C00)
    else:
        even = ((w << 8) & _both(0x8000)) | ((w << 4) & _both(0x07F0))
        odd = (w & _both(0x8000)) | ((w >> 4) & _both(0x07F0))
        back = _both(0x7B80)
    return _numbers(tl.join(even, odd), back, _both(0x8000), scales, SCALED, HALF, ASM, BN, D)


@triton.jit
def int8_tile(
    w, scales, SCALED: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """In the mantissa of 128 (1024) the seven low bits, less the same with the sign's bit, which counts 128."""
    base = _both(0x6400 if HALF else 0x4300)
    code = tl.join(w, w >> 8)
    low, sign = (code & _both(0x007F)) | base, (code & _both(0x0080)) | base
    # -sign, by the sign bits of both halves.
    return _numbers(
        low, _both(0x3C00 if HALF else 0x3F80), sign ^ _both(0x8000), scales, SCALED, HALF, ASM, BN, D
    )  # fmt: skip


@triton.jit
def int4_tile(
    w, scales, SCALED: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    base = _both(0x5C00 if HALF else 0x4200)
    return _quarters(
        _nibbles(w ^ _both(0x8888), 2, _both(0x003C), base), 8, scales, SCALED, HALF, ASM, BN, D
    )  # fmt: skip


@triton.jit
def e8x4_tile(
    w, scales, SCALED: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """As int4_tile, with the coset's half and the quarter in the two bits below the code."""
    parity = w & 0x01111111
    parity ^= parity >> 16
    parity ^= parity >> 8
    parity ^= parity >> 4
    base = _both(0x5C01 if HALF else 0x4201) | ((w >> 27) & 2) | ((w >> 11) & 0x00020000)
    w = (w & ~(1 << 28)) | ((parity & 1) << 28)
    return _quarters(
        _nibbles(w ^ _both(0x8888), 2, _both(0x003C), base), 8, scales, SCALED, HALF, ASM, BN, D
    )  # fmt: skip


@triton.jit
def e8x2_tile(
    w, scales, SCALED: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Two points a word, one in each half."""
    parity = w & _both(0x1555)
    parity ^= parity >> 8
    parity ^= parity >> 4
    parity ^= parity >> 2
    base = _both(0x5C01 if HALF else 0x4201) | ((w >> 13) & _both(0x0002))
    w = ((w & ~_both(0x4000)) | ((parity & _both(0x0001)) << 14)) ^ _both(0xAAAA)
    mask = _both(0x000C)
    first = tl.join(
        tl.join((w << 2) & mask | base, (w >> 6) & mask | base),
        tl.join((w >> 2) & mask | base, (w >> 10) & mask | base),
    )
    second = tl.join(
        tl.join(w & mask | base, (w >> 8) & mask | base),
        tl.join((w >> 4) & mask | base, (w >> 12) & mask | base),
    )
    return _quarters(tl.join(first, second).reshape(BN, D // 16, 8), 2, scales, SCALED, HALF, ASM, BN, D)


@triton.jit
def nvfp4_tile(
    w, scales, SCALED: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Like fp8_tile: 2^-126 (2^-14) of the value."""
    nothing = _both(0)
    sign = _nibbles(w, 12, _both(0x8000), nothing)
    rest = _nibbles(w, 9, _both(0x0E00), nothing) if HALF else _nibbles(w, 6, _both(0x01C0), nothing)
    back = _both(0x7400 if HALF else 0x7E80)
    return _numbers(sign | rest, back, _both(0x8000), scales, SCALED, HALF, ASM, BN, D)


@triton.jit
def _both(half: tl.constexpr):
    """A constant in both halves, as int32."""
    return tl.full([], (half * 0x10001 + (1 << 31)) % (1 << 32) - (1 << 31), tl.int32)


@triton.jit
def _nibbles(w, left: tl.constexpr, mask, base):
    """int32 [BN, N] -> [BN, N, 4]: the nibbles of both halves in turn, moved up by `left` bits from bit 0, masked, over
    `base` [BN, N] or a scalar."""
    first = (w << left) & mask | base
    second = (w << (left - 4) if left >= 4 else w >> (4 - left)) & mask | base
    third = (w << (left - 8) if left >= 8 else w >> (8 - left)) & mask | base
    fourth = (w << (left - 12) if left >= 12 else w >> (12 - left)) & mask | base
    return tl.join(tl.join(first, third), tl.join(second, fourth)).reshape(w.shape[0], w.shape[1], 4)


@triton.jit
def _quarters(
    pairs, zero: tl.constexpr, scales, SCALED: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Quarters above 32 (256), whose mantissa counts them, less 32 (256) and `zero`."""
    one = _both(0x3C00 if HALF else 0x3F80)
    less = _both((0xDC00 if HALF else 0xC200) + 4 * zero)
    return _numbers(pairs, one, less, scales, SCALED, HALF, ASM, BN, D)


@triton.jit
def _numbers(
    pairs, factor, more, scales, SCALED: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """pairs * factor + more, exact, times the scales: [BN, D]. pairs, factor and more: two numbers a word."""
    GROUPS: tl.constexpr = scales.shape[1]
    if ASM:
        numbers = _fma2(pairs, factor, more, HALF).reshape(BN, GROUPS, D // 2 // GROUPS)
        if SCALED:
            bits = scales.to(tl.float16 if HALF else tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            numbers = _fma2(numbers, (bits | (bits << 16))[:, :, None], _both(0x8000), HALF)
        lower, upper = tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [numbers],
            dtype=(tl.float16, tl.float16) if HALF else (tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
        return tl.join(lower, upper).reshape(BN, D)
    else:
        lower = _float(pairs, HALF) * _float(factor, HALF) + _float(more, HALF)
        upper = _float(pairs >> 16, HALF) * _float(factor >> 16, HALF) + _float(more >> 16, HALF)
        numbers = tl.join(lower, upper).reshape(BN, GROUPS, D // GROUPS)
        return (numbers * scales[:, :, None] if SCALED else numbers).reshape(BN, D)


@triton.jit
def _fma2(a, b, c, HALF: tl.constexpr):
    """a * b + c in both halves."""
    return tl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;" if HALF else "fma.rn.bf16x2 $0, $1, $2, $3;",
        "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _float(word, HALF: tl.constexpr):
    """float32 of the number in the lower half."""
    if HALF:
        return (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (word << 16).to(tl.float32, bitcast=True)
