# pyrefly: ignore-errors
"""The kernel; `store` starts it and says what it does."""

import triton
import triton.language as tl

from kernels.kv_codec.eights import eights, rotated
from kernels.kv_codec.encode import put


@triton.jit(do_not_specialize_on_alignment=["page_ptr", "offset_ptr"])
def store(
    q_ptr, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, page_ptr, offset_ptr, out_ptr,
    k_codes_ptr, k_scales_ptr, v_codes_ptr, v_scales_ptr, eps,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride, out_row_stride,
    out_head_stride, k_codes_page_stride, k_codes_token_stride, k_codes_head_stride, k_scales_page_stride,
    k_scales_token_stride, k_scales_head_stride, v_codes_page_stride, v_codes_token_stride, v_codes_head_stride,
    v_scales_page_stride, v_scales_token_stride, v_scales_head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, TURNING: tl.constexpr, NORM: tl.constexpr,
    ROTATED: tl.constexpr, KEYS: tl.constexpr, KEY_GROUP: tl.constexpr, VALUES: tl.constexpr,
    VALUE_GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, HEADS + 2 KV_HEADS): a program takes one head of q, k or v. TURNING: the first dims of a head,
    which the position turns. ROTATED: K and V; attention rotates q."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cos_ptr += token * (TURNING // 2)
    sin_ptr += token * (TURNING // 2)
    if head < HEADS:
        q = q_ptr + token * q_row_stride + head * q_head_stride
        x = _positioned(q, q_weight_ptr, cos_ptr, sin_ptr, eps, D, TURNING, NORM)
        target = out_ptr + token * out_row_stride + head * out_head_stride
        tl.store(target + tl.arange(0, D), x.to(out_ptr.dtype.element_ty))
    else:
        page = tl.load(page_ptr + token)
        offset = tl.load(offset_ptr + token)
        if page >= 0:
            if head < HEADS + KV_HEADS:
                of = head - HEADS
                k = k_ptr + token * k_row_stride + of * k_head_stride
                x = _positioned(k, k_weight_ptr, cos_ptr, sin_ptr, eps, D, TURNING, NORM)
                xs = eights(x, D // 8)
                if ROTATED:
                    xs = rotated(xs, D // 8)
                codes = page * k_codes_page_stride + offset * k_codes_token_stride + of * k_codes_head_stride
                scales = page * k_scales_page_stride + offset * k_scales_token_stride + of * k_scales_head_stride
                put(xs, k_codes_ptr + codes, k_scales_ptr + scales, D // 8, KEYS, KEY_GROUP)
            else:
                of = head - HEADS - KV_HEADS
                v = v_ptr + token * v_row_stride + of * v_head_stride
                x = tl.load(v + tl.arange(0, D)).to(tl.float32)
                xs = eights(x, D // 8)
                if ROTATED:
                    xs = rotated(xs, D // 8)
                codes = page * v_codes_page_stride + offset * v_codes_token_stride + of * v_codes_head_stride
                scales = page * v_scales_page_stride + offset * v_scales_token_stride + of * v_scales_head_stride
                put(xs, v_codes_ptr + codes, v_scales_ptr + scales, D // 8, VALUES, VALUE_GROUP)


@triton.jit
def _positioned(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, eps, D: tl.constexpr, TURNING: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """One head, normed and turned by its position: float32 [D], rounded to x's type after each of the two."""
    HALF: tl.constexpr = TURNING // 2
    dim = tl.arange(0, D)
    turns = dim < TURNING
    # The other one of the pair, which is read once more; a dim that does not turn is its own.
    other = tl.where(turns, tl.where(dim < HALF, dim + HALF, dim - HALF), dim)
    x = tl.load(x_ptr + dim).to(tl.float32)
    partner = tl.load(x_ptr + other).to(tl.float32)
    if NORM != "none":
        inverse = tl.rsqrt(tl.sum(x * x, 0) * (1 / D) + eps)
        x = _normed(x * inverse, weight_ptr + dim, x_ptr.dtype.element_ty, NORM)
        partner = _normed(partner * inverse, weight_ptr + other, x_ptr.dtype.element_ty, NORM)
    cos = tl.load(cos_ptr + dim % HALF, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + dim % HALF, mask=turns, other=0.0)
    turned = tl.where(dim < HALF, x * cos - partner * sin, x * cos + partner * sin)
    return tl.where(turns, turned.to(x_ptr.dtype.element_ty).to(tl.float32), x)


@triton.jit
def _normed(x, weight_ptr, DTYPE: tl.constexpr, NORM: tl.constexpr):
    weight = tl.load(weight_ptr).to(tl.float32)
    x = x * (1.0 + weight) if NORM == "centred" else weight * x.to(DTYPE).to(tl.float32)
    return x.to(DTYPE).to(tl.float32)
