# pyrefly: ignore-errors
"""The kernels; `launches` starts them."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def norm(
    x_ptr, gate_ptr, weight_ptr, out_ptr, eps, count, x_token_stride, x_head_stride, gate_token_stride,
    gate_head_stride, HEADS: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr, COUNT: tl.constexpr,
    KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """COUNT of the vectors of N elements, of x and gate each as `kernels.vectors` says where they begin."""
    n = tl.arange(0, WIDE)[None, :]
    vector = tl.program_id(0) * COUNT + tl.arange(0, COUNT)[:, None]
    token, head = (vector // HEADS).to(tl.int64), vector % HEADS
    kept = (vector < count) & (n < N)
    weight = tl.load(weight_ptr + n, mask=n < N, other=0.0)  # before the wait: no kernel of a step writes weights
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + (token * x_token_stride + head * x_head_stride) + n, mask=kept, other=0.0).to(tl.float32)
    if KIND == "gated":  # before the sum waits for x
        gate = tl.load(gate_ptr + (token * gate_token_stride + head * gate_head_stride) + n, mask=kept, other=0.0)
    weight = weight.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / N + eps)[:, None]
    if KIND == "plain":
        x = weight * x.to(x_ptr.dtype.element_ty).to(tl.float32)
    elif KIND == "centred":
        x *= 1.0 + weight
    else:
        gate = gate.to(tl.float32)
        x = x * weight * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out_ptr + vector.to(tl.int64) * N + n, x.to(out_ptr.dtype.element_ty), mask=kept)


@triton.jit
def _float64(value: tl.constexpr):
    return tl.full([], value, tl.float64)


@triton.jit(do_not_specialize=["count"])
def angles(
    positions_ptr, frequencies_ptr, cos_ptr, sin_ptr, count, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """count: of angles, PAIRS a position. The product is rounded to float32, as the reference rounds it; all behind it
    is in float64, where an angle of up to 2^20 loses nothing that float32 would show. Taylor's series up to the 13th
    and 14th power are exact to 2^-45 up to pi / 4."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = n < count
    frequency = tl.load(frequencies_ptr + n % PAIRS, mask=kept, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(positions_ptr + n // PAIRS, mask=kept, other=0)
    angle = (position.to(tl.float32) * frequency).to(tl.float64)
    quarter = tl.floor(angle * _float64(0.6366197723675814) + _float64(0.5))
    # pi / 2 in two parts, the first of 33 bits (fdlibm), so that its product and the difference are exact.
    r = (angle - quarter * _float64(1.57079632673412561417)) - quarter * _float64(6.07710050650619224932e-11)
    s = r * r
    odd = _float64(1 / 6227020800)
    odd = odd * s - _float64(1 / 39916800)
    odd = odd * s + _float64(1 / 362880)
    odd = odd * s - _float64(1 / 5040)
    odd = odd * s + _float64(1 / 120)
    odd = odd * s - _float64(1 / 6)
    sine = r + r * s * odd
    even = _float64(-1 / 87178291200)
    even = even * s + _float64(1 / 479001600)
    even = even * s - _float64(1 / 3628800)
    even = even * s + _float64(1 / 40320)
    even = even * s - _float64(1 / 720)
    even = even * s + _float64(1 / 24)
    even = even * s - _float64(0.5)
    cosine = _float64(1.0) + s * even
    turn = quarter.to(tl.int32) & 3
    swapped = (turn & 1) != 0
    cos = tl.where(swapped, sine, cosine)
    sin = tl.where(swapped, cosine, sine)
    cos = tl.where((turn == 1) | (turn == 2), -cos, cos)
    sin = tl.where(turn >= 2, -sin, sin)
    tl.store(cos_ptr + n, cos.to(tl.float32), mask=kept)
    tl.store(sin_ptr + n, sin.to(tl.float32), mask=kept)
