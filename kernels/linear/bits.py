# pyrefly: ignore-errors
"""Codes in 32-bit words to tiles of a matrix, inside a Triton kernel. `packing` says how they lie.

Every function returns tiles [slices, rows, 2 * words] of neighbouring columns, in bfloat16 when ASM, else float32. With
ASM two codes are decoded at once in the halves of a register; without it (Triton's interpreter, whose bfloat16 is
wrong, and other vendors) one at a time. `w` is always int32 [slices, rows, words].

The integer formats put the code into the mantissa of 128.0 (0x4300) or, int3, of 1.0, and a multiply-add makes the code
of it: exact, since bfloat16 has 8 bits. The float formats shift exponent and mantissa to where bfloat16 has them, which
divides the value by a power of two that a multiplication puts back, also for subnormals.
"""

import triton
import triton.language as tl


@triton.jit
def _join(lower, upper):
    return tl.join(lower, upper).reshape(lower.shape[0], lower.shape[1], 2 * lower.shape[2])


@triton.jit
def _halves(t):
    lower, upper = tl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [t], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
    )
    return _join(lower, upper)


@triton.jit
def _fma2(a, b, c):
    """a * b + c in both halves."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _masked(t, mask: tl.constexpr, word):
    """(t & mask) | word. Said in PTX, since ptxas makes two instructions of it where both are constants."""
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xEA;",
        "=r,r,r,r",
        [t, tl.full([], mask, tl.int32), word],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _signed(t, mask: tl.constexpr, zero: tl.constexpr, ASM: tl.constexpr):
    """Codes under `mask` in both halves, less `zero`."""
    if ASM:
        # -(128 + zero): its mantissa is zero / 128.
        less = tl.full([], (0xC300 + zero) * 0x10001 - (1 << 32), tl.int32)
        return _halves(
            _fma2(_masked(t, mask, tl.full([], 0x43004300, tl.int32)), tl.full([], 0x3F803F80, tl.int32), less)
        )
    else:
        return _join((t & mask & 0xFF).to(tl.float32) - zero, (((t & mask) >> 16) & 0xFF).to(tl.float32) - zero)


@triton.jit
def int4_pair(w, p: tl.constexpr, ASM: tl.constexpr):
    return _signed(w >> (4 * p), 0x000F000F, 8, ASM)


@triton.jit
def int3_pair(w0, w1, w2, p: tl.constexpr, ASM: tl.constexpr):
    if p < 5:
        w = w0
    elif p < 10:
        w = w1
    else:
        w = w2
    if p == 15:
        t = ((w0 << 4) & 0x00100010) | ((w1 << 5) & 0x00200020) | ((w2 << 6) & 0x00400040)
    elif p % 5 == 4:
        t = w >> 9
    elif p % 5 >= 2:
        t = w >> 6
    else:
        t = w
    LOW: tl.constexpr = p < 15 and p % 5 % 2 == 1
    if ASM:
        one = tl.full([], 0x3F803F80, tl.int32)
        if LOW:  # (1 + code / 64) * 64 - 68
            t = _fma2(
                _masked(t, 0x000E000E, one),
                tl.full([], 0x42804280, tl.int32),
                tl.full([], 0xC288C288 - (1 << 32), tl.int32),
            )
        else:  # (1 + code / 8) * 8 - 12
            t = _fma2(
                _masked(t, 0x00700070, one),
                tl.full([], 0x41004100, tl.int32),
                tl.full([], 0xC140C140 - (1 << 32), tl.int32),
            )
        return _halves(t)
    else:
        t = t >> (1 if LOW else 4)
        return _join((t & 7).to(tl.float32) - 4, ((t >> 16) & 7).to(tl.float32) - 4)


@triton.jit
def _moved(w, left: tl.constexpr):
    if left >= 0:
        return w << left
    else:
        return w >> -left


@triton.jit
def int5_pair(w, high, p: tl.constexpr, bit: tl.constexpr, ASM: tl.constexpr):
    """`bit`: where the fifth bit lies in the halves of `high`."""
    return _signed(((w >> (4 * p)) & 0x000F000F) | (_moved(high, 4 - bit) & 0x00100010), 0x001F001F, 16, ASM)


@triton.jit
def int6_pair(w, high, p: tl.constexpr, bit: tl.constexpr, ASM: tl.constexpr):
    return _signed(((w >> (4 * p)) & 0x000F000F) | (_moved(high, 4 - bit) & 0x00300030), 0x003F003F, 32, ASM)


@triton.jit
def int8_pair(low, high, p: tl.constexpr, ASM: tl.constexpr):
    if ASM:
        word = tl.full([], 0x43004300, tl.int32)
        lower = _masked(low >> (4 * p), 0x000F000F, word)
        upper = _masked(high >> (4 * p), 0x000F000F, word)
        less = tl.full([], 0xC510C510 - (1 << 32), tl.int32)  # -2304 = -(16 * 128 + 128 + 128)
        upper = _fma2(upper, tl.full([], 0x41804180, tl.int32), less)  # 16 * (128 + code) - 2304
        return _halves(_fma2(lower, tl.full([], 0x3F803F80, tl.int32), upper))
    else:
        code = ((low >> (4 * p)) & 0x000F000F) | (((high >> (4 * p)) & 0x000F000F) << 4)
        return _join((code & 0xFF).to(tl.float32) - 128, ((code >> 16) & 0xFF).to(tl.float32) - 128)


@triton.jit
def _e2m1(t):
    """The nibble at bits 15, 8, 7 and 6."""
    code = ((t >> 6) & 7).to(tl.int32)
    exponent = code >> 1
    mantissa = (code & 1).to(tl.float32)
    value = tl.where(
        exponent == 0, 0.5 * mantissa, (1 << tl.maximum(exponent - 1, 0)).to(tl.float32) * (1 + 0.5 * mantissa)
    )
    return tl.where((t & 0x8000) != 0, -value, value)


@triton.jit
def _rotated(w, left: tl.constexpr):
    u = w.to(tl.uint32, bitcast=True)
    return ((u << left) | (u >> (32 - left))).to(tl.int32, bitcast=True)


@triton.jit
def nvfp4_pair(w, scales, p: tl.constexpr, ASM: tl.constexpr):
    """scales int32 [slices, rows]: a byte of a scale for each pair of a unit. The tile is 2^16 too small with ASM."""
    SIGN: tl.constexpr = 0x80008000 - (1 << 32)
    MASK: tl.constexpr = 0x81C081C0 - (1 << 32)
    UPPER: tl.constexpr = 0x81808180 - (1 << 32)
    if p == 3:
        if ASM:
            t = _masked(w << 6, 0x00400040, _rotated(w, 14) & UPPER)
        else:
            t = ((w << 6) & 0x00400040) | (_rotated(w, 14) & UPPER)
    elif p == 2:
        t = _rotated(w, 10) & MASK
    else:
        t = (w << (4 * p)) & MASK
    if ASM:
        # In both halves 0x7000 + 16 times the byte: 2^110 times the scale. The multiplication moves the code's exponent
        # up by as much, also of its subnormal.
        lower = scales & (0xF0F0F0F0 - (1 << 32))
        upper = _masked(scales, 0x0F0F0F0F, tl.full([], 0x70707070, tl.int32))
        scale = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [lower, upper, tl.full([], 0x4040 + 0x1111 * p, tl.int32)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        nothing = tl.full([], SIGN, tl.int32)
        return _halves(_fma2(t, scale[:, :, None], nothing))
    else:
        byte = (scales >> (8 * p)) & 0xFF
        byte = ((byte & 15) << 4) | (byte >> 4)
        scale = ((byte << 20) + (114 << 23)).to(tl.float32, bitcast=True)[:, :, None]
        return _join(_e2m1(t & 0xFFFF) * scale, _e2m1((t >> 16) & 0xFFFF) * scale)


@triton.jit
def _e4m3(t):
    """The byte's sign at bit 15, the rest at bits 10 to 4."""
    code = (t >> 4) & 0x7F
    exponent = code >> 3
    mantissa = (code & 7).to(tl.float32)
    normal = ((code << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, mantissa * 0.001953125, normal)
    return tl.where((t & 0x8000) != 0, -value, value)


@triton.jit
def fp8_pair(w, p: tl.constexpr, ASM: tl.constexpr):
    SIGN: tl.constexpr = 0x80008000 - (1 << 32)
    if p == 0:
        t = ((w << 8) & SIGN) | ((w << 4) & 0x07F007F0)
    else:
        t = (w & SIGN) | ((w >> 4) & 0x07F007F0)
    if ASM:
        back = tl.full([], 0x7B807B80, tl.int32)  # 2^120
        nothing = tl.full([], SIGN, tl.int32)
        return _halves(_fma2(t, back, nothing))
    else:
        return _join(_e4m3(t & 0xFFFF), _e4m3((t >> 16) & 0xFFFF))
