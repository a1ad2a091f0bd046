# pyrefly: ignore-errors
"""Words of codes -> operands of matrix instructions, in the registers that these want (docs/kv-formats.md says how
codes lie).

A lane of mma.m16n8k16 holds pairs of numbers that follow each other along the sum, four of a row (`kWidth` 4): lane t
of four those of columns 4t to 4t + 3. The order along a sum is free, and so is that of an output's rows, so that a lane
takes whole words as they lie, and nothing is exchanged between lanes. Of K the sum goes over dims, and a pair is two
codes of a word; of V it goes over tokens, and a pair is the same code of two neighbours' words. C: the dims of an
operand, 64 or all where they are less.

Numbers are float16, which has every code exactly. They come without their scales, but with them where a scale is for
less than 64 dims. With ASM two are computed at once; without it (Triton's interpreter, and float32 products) the same
bits are split to float32. CVT: the hardware converts E4M3 (compute capability 8.9 and up).
"""

import triton
import triton.language as tl


@triton.jit
def key_order(column, CODEC: tl.constexpr, C: tl.constexpr, NATURAL: tl.constexpr):
    """The dim of a chunk of C that is in `column` of its key operand. NATURAL: ASM and CVT."""
    E: tl.constexpr = 4 if CODEC == "fp8" or CODEC == "int8" else 16 if CODEC == "e8x2" else 8
    T: tl.constexpr = min(4, C // E)
    half = column % 2
    pair = column // 2 % 2 + column // (4 * T) % (E // 4) * 2
    word = column // 4 % T * (C // E // T) + column // (T * E)
    return word * E + (2 * pair + half if NATURAL and CODEC == "fp8" else half * (E // 2) + pair)


@triton.jit
def key_operand(
    w, scales, CODEC: tl.constexpr, ASM: tl.constexpr, CVT: tl.constexpr, S: tl.constexpr, BN: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """w int32 [S, BN, words of C dims] -> [S, BN, C]. scales: of nvfp4, int32 [S, BN]: four E4M3."""
    E: tl.constexpr = 4 if CODEC == "fp8" or CODEC == "int8" else 16 if CODEC == "e8x2" else 8
    W: tl.constexpr = C // E
    T: tl.constexpr = min(4, W)
    pairs = _pairs(_prepared(w, CODEC), _base(w, w, CODEC, ASM), CODEC, ASM, CVT)
    pairs = pairs.reshape(S, BN, T, W // T, E // 4, 2).permute(0, 1, 3, 4, 2, 5)
    if CODEC == "nvfp4":
        byte = (scales[:, :, None] >> (tl.arange(0, W) // 2 * 8)[None, None, :]) & 0xFF
        factors = _e4m3(byte | (byte << 16), ASM).reshape(S, BN, T, W // T, 1, 1).permute(0, 1, 3, 4, 2, 5)
    else:
        factors = pairs
    return _numbers(pairs, factors, CODEC == "nvfp4", ASM).reshape(S, BN, C)


@triton.jit
def value_order(x, CODEC: tl.constexpr, C: tl.constexpr):
    """[C, N]: rows in the order of a value operand -> in that of the dims."""
    G: tl.constexpr = min(8, C // (4 if CODEC == "fp8" or CODEC == "int8" else 8))
    return x.reshape(C // G, G, x.shape[1]).permute(1, 0, 2).reshape(C, x.shape[1])


@triton.jit
def value_operand(
    a, b, scales_a, scales_b, CODEC: tl.constexpr, DIMS: tl.constexpr, ASM: tl.constexpr, CVT: tl.constexpr,
    S: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """a and b int32 [S, BN / 2, words of C dims], of the first and the second tokens of pairs -> [S, C, BN], its rows
    in an order that `value_order` undoes. scales: where a scale is for DIMS less than C, int32 [S, BN / 2]: those of
    C dims, two float16 or four E4M3."""
    E: tl.constexpr = 4 if CODEC == "fp8" or CODEC == "int8" else 8
    W: tl.constexpr = C // E
    G: tl.constexpr = min(8, W)
    NATURAL: tl.constexpr = CODEC == "fp8" and ASM and CVT
    base = _base(a, b, CODEC, ASM)
    a, b = _prepared(a, CODEC), _prepared(b, CODEC)
    low = _pairs(_permuted(a, b, 0x5140 if NATURAL else 0x5410, ASM), base, CODEC, ASM, CVT)
    high = _pairs(_permuted(a, b, 0x7362 if NATURAL else 0x7632, ASM), base, CODEC, ASM, CVT)
    pairs = tl.join(low, high).permute(0, 1, 2, 4, 3)
    pairs = pairs.reshape(S, BN // 2, G, W // G, E).permute(0, 3, 4, 2, 1)
    SCALED: tl.constexpr = DIMS < C
    if SCALED:
        word = tl.arange(0, W)[None, None, :]
        if CODEC == "nvfp4":
            moved = word // 2 * 8
            even = (scales_a[:, :, None] >> moved) & 0xFF
            factors = _e4m3(even | ((scales_b[:, :, None] >> moved) & 0xFF) << 16, ASM)
        else:
            tl.static_assert(DIMS == 32)
            first = _permuted(scales_a, scales_b, 0x5410, ASM)[:, :, None]
            second = _permuted(scales_a, scales_b, 0x7632, ASM)[:, :, None]
            factors = tl.where(word < W // 2, first, second)
        factors = factors.reshape(S, BN // 2, G, W // G, 1).permute(0, 3, 4, 2, 1)
    else:
        factors = pairs
    return _numbers(pairs, factors, SCALED, ASM).reshape(S, C, BN)


@triton.jit
def _both(half: tl.constexpr):
    """A constant in both halves, as int32."""
    return tl.full([], (half * 0x10001 + (1 << 31)) % (1 << 32) - (1 << 31), tl.int32)


@triton.jit
def _permuted(a, b, CHOICE: tl.constexpr, ASM: tl.constexpr):
    """Bytes 0 to 3 of a and 4 to 7 of b, as CHOICE says from the lowest on."""
    if ASM:
        chosen = tl.full([], CHOICE, tl.int32)
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, chosen], dtype=tl.int32, is_pure=True, pack=1
        )
    elif CHOICE == 0x5410:
        return (a & 0xFFFF) | (b << 16)
    else:
        tl.static_assert(CHOICE == 0x7632)
        return ((a >> 16) & 0xFFFF) | (b & -65536)


@triton.jit
def _masked(w, mask, base, ASM: tl.constexpr):
    """(w & mask) ^ base: besides what is around a field, base has the bit that turns the sign of one in two's
    complement. Said in PTX, since ptxas makes two instructions of it where both are constants."""
    if ASM:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0x6A;", "=r,r,r,r", [w, mask, base], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return (w & mask) ^ base


@triton.jit
def _base(a, b, CODEC: tl.constexpr, ASM: tl.constexpr):
    """What goes around the fields of E8: in the lower half with a's coset, in the upper with b's."""
    if CODEC == "e8x4":
        low = _masked(a >> 27, tl.full([], 0x00000002, tl.int32), _both(0x5C21), ASM)
        return _masked(b >> 11, tl.full([], 0x00020000, tl.int32), low, ASM)
    elif CODEC == "e8x2":
        return _masked(a >> 13, _both(0x0002), _both(0x5C09), ASM)
    else:
        return a


@triton.jit
def _prepared(w, CODEC: tl.constexpr):
    """Words whose fields `_pairs` takes as they are."""
    if CODEC == "e8x4":
        # In bit 28 of the product stands the sum of the fields' lowest bits, modulo 2.
        parity = (w & 0x01111111) * 0x11111111
        return (w & ~(1 << 28)) | (parity & (1 << 28))
    elif CODEC == "e8x2":
        parity = w & _both(0x1555)
        parity ^= parity >> 8
        parity ^= parity >> 4
        parity ^= parity >> 2
        return (w & ~_both(0x4000)) | ((parity & _both(0x0001)) << 14)
    else:
        return w


@triton.jit
def _pairs(w, base, CODEC: tl.constexpr, ASM: tl.constexpr, CVT: tl.constexpr):
    """int32 [S, N, W] -> [S, N, W, pairs of a word], two float16 each: of E4M3 that the hardware converts neighbours,
    otherwise those at the same place of the word's halves."""
    if CODEC == "fp8":
        if ASM and CVT:
            first, second = tl.inline_asm_elementwise(
                "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;}",
                "=r,=r,r", [w], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
            )  # fmt: skip
            return tl.join(first, second)
        else:
            # 2^-8 of the value, also of subnormals.
            even = _masked(w << 7, _both(0x3F80), (w << 8) & _both(0x8000), ASM)
            odd = _masked(w >> 1, _both(0x3F80), w & _both(0x8000), ASM)
            return _fma2(tl.join(even, odd), _both(0x5C00), _both(0x8000), ASM)
    elif CODEC == "int8":
        # 1024 + u, where u is the code and 128. Less 1152.
        even, odd = _masked(w, _both(0x00FF), _both(0x6480), ASM), _masked(w >> 8, _both(0x00FF), _both(0x6480), ASM)
        return _fma2(tl.join(even, odd), _both(0x3C00), _both(0xE480), ASM)
    elif CODEC == "int4":
        # u is the code and 8. Of a lower nibble 1024 + u, less 1032; of an upper one a 16th of 1024 + 16 u, less 72.
        other = w >> 8
        first = _fma2(_masked(w, _both(0x000F), _both(0x6408), ASM), _both(0x3C00), _both(0xE408), ASM)
        second = _fma2(_masked(w, _both(0x00F0), _both(0x6480), ASM), _both(0x2C00), _both(0xD480), ASM)
        third = _fma2(_masked(other, _both(0x000F), _both(0x6408), ASM), _both(0x3C00), _both(0xE408), ASM)
        fourth = _fma2(_masked(other, _both(0x00F0), _both(0x6480), ASM), _both(0x2C00), _both(0xD480), ASM)
        return _four(first, second, third, fourth)
    elif CODEC == "nvfp4":
        # 2^-14 of the value.
        first = _masked(w << 9, _both(0x0E00), (w << 12) & _both(0x8000), ASM)
        second = _masked(w << 5, _both(0x0E00), (w << 8) & _both(0x8000), ASM)
        third = _masked(w << 1, _both(0x0E00), (w << 4) & _both(0x8000), ASM)
        fourth = _masked(w >> 3, _both(0x0E00), w & _both(0x8000), ASM)
        return _fma2(_four(first, second, third, fourth), _both(0x7400), _both(0x8000), ASM)
    elif CODEC == "e8x4":
        # Quarters above 256: the code, the coset's half and the quarter. Less 256 and 8.
        first = _four(
            _masked(w << 2, _both(0x003C), base, ASM), _masked(w >> 2, _both(0x003C), base, ASM),
            _masked(w >> 6, _both(0x003C), base, ASM), _masked(w >> 10, _both(0x003C), base, ASM),
        )  # fmt: skip
        return _fma2(first, _both(0x3C00), _both(0xDC20), ASM)
    else:
        tl.static_assert(CODEC == "e8x2")
        first = _four(
            _masked(w << 2, _both(0x000C), base, ASM), _masked(w, _both(0x000C), base, ASM),
            _masked(w >> 2, _both(0x000C), base, ASM), _masked(w >> 4, _both(0x000C), base, ASM),
        )  # fmt: skip
        second = _four(
            _masked(w >> 6, _both(0x000C), base, ASM), _masked(w >> 8, _both(0x000C), base, ASM),
            _masked(w >> 10, _both(0x000C), base, ASM), _masked(w >> 12, _both(0x000C), base, ASM),
        )  # fmt: skip
        both = tl.join(first, second).permute(0, 1, 2, 4, 3).reshape(w.shape[0], w.shape[1], w.shape[2], 8)
        return _fma2(both, _both(0x3C00), _both(0xDC08), ASM)


@triton.jit
def _four(first, second, third, fourth):
    together = tl.join(tl.join(first, third), tl.join(second, fourth))
    return together.reshape(first.shape[0], first.shape[1], first.shape[2], 4)


@triton.jit
def _e4m3(byte, ASM: tl.constexpr):
    """Two scales of nvfp4, a byte in each half -> their float16; without ASM 2^-8 of them, in float16's bits."""
    # 0x7F is NaN.
    bits = _masked(byte << 7, _both(0x3F80), ((byte + _both(0x0001)) & _both(0x0080)) << 7, ASM)
    return _fma2(bits, _both(0x5C00), _both(0x8000), ASM)


@triton.jit
def _fma2(a, b, c, ASM: tl.constexpr):
    """a * b + c in both halves, which is exact here."""
    if ASM:
        return tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        lower = (_float(a) * _float(b) + _float(c)).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        upper = (_float(a >> 16) * _float(b >> 16) + _float(c >> 16)).to(tl.float16).to(tl.int16, bitcast=True)
        return (lower & 0xFFFF) | (upper.to(tl.int32) << 16)


@triton.jit
def _numbers(pairs, factors, SCALED: tl.constexpr, ASM: tl.constexpr):
    """[...] -> [..., 2]"""
    if ASM:
        if SCALED:
            pairs = _fma2(pairs, factors, _both(0x8000), ASM)
        lower, upper = tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=1
        )
        return tl.join(lower, upper)
    elif SCALED:
        return tl.join(_float(pairs) * _float(factors), _float(pairs >> 16) * _float(factors >> 16))
    else:
        return tl.join(_float(pairs), _float(pairs >> 16))


@triton.jit
def _float(word):
    """float32 of the float16 in the lower half."""
    return (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
