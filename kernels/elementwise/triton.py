# pyrefly: ignore-errors
"""The kernels; `launches` starts them."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def sigmoid_gated(
    x_ptr, gate_ptr, out_ptr, count, x_token_stride, x_head_stride, gate_token_stride, gate_head_stride,
    HEADS: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """COUNT of the vectors of N elements, of x and gate each as `kernels.vectors` says where they begin."""
    n = tl.arange(0, WIDE)[None, :]
    vector = tl.program_id(0) * COUNT + tl.arange(0, COUNT)[:, None]
    token, head = (vector // HEADS).to(tl.int64), vector % HEADS
    kept = (vector < count) & (n < N)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + (token * x_token_stride + head * x_head_stride) + n, mask=kept, other=0.0)
    gate = tl.load(gate_ptr + (token * gate_token_stride + head * gate_head_stride) + n, mask=kept, other=0.0)
    share = (1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))).to(gate_ptr.dtype.element_ty)
    result = x.to(tl.float32) * share.to(tl.float32)
    tl.store(out_ptr + vector.to(tl.int64) * N + n, result.to(out_ptr.dtype.element_ty), mask=kept)


@triton.jit
def silu_gated(gate_up_ptr, out_ptr, N, row_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Columns program_id(1) of row program_id(0)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = n < N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(gate_up_ptr + row * row_stride + n, mask=kept, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * row_stride + N + n, mask=kept, other=0.0).to(tl.float32)
    gated = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * N + n, (gated * up).to(out_ptr.dtype.element_ty), mask=kept)


@triton.jit
def add(residual_ptr, x_ptr, out_ptr, N, BLOCK: tl.constexpr, PDL: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    kept = n < N
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.load(residual_ptr + n, mask=kept, other=0.0).to(tl.float32)
    total += tl.load(x_ptr + n, mask=kept, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, total.to(out_ptr.dtype.element_ty), mask=kept)
