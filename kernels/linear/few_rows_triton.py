# pyrefly: ignore-errors
"""The kernels; `few_rows` starts them and says what they do."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def by_row(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, rows, outputs, x_stride, weight_stride,
    K: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row program_id(0) of the matrix, BM rows of x, in blocks of BK columns.

    The loads of all blocks stand before the first product, and have no mask where K allows it: with one, ptxas waits
    for each of them before it starts the next."""
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    n = tl.program_id(0)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)[None, :]
    weight_ptr += n.to(tl.int64) * weight_stride
    weights = ()
    for block in tl.static_range(BLOCKS):
        weights += (_block(weight_ptr, block * BK + k, K, BK),)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.minimum(m, rows - 1).to(tl.int64)[:, None]
    xs = ()
    for block in tl.static_range(BLOCKS):
        xs += (_block(x_ptr + row * x_stride, block * BK + k, K, BK),)
    sums = tl.zeros((BM, BK), tl.float32)
    for block in tl.static_range(BLOCKS):
        sums += xs[block].to(tl.float32) * weights[block].to(tl.float32)
    total = tl.sum(sums, 1)

    target = m.to(tl.int64) * outputs + n
    if BIAS:
        total += tl.load(bias_ptr + n).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual_ptr + target, mask=m < rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + target, total.to(out_ptr.dtype.element_ty), mask=m < rows)


@triton.jit
def _block(pointer, k, K: tl.constexpr, BK: tl.constexpr):
    return tl.load(pointer + k) if K % BK == 0 else tl.load(pointer + k, mask=k < K, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def by_tile(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, rows, outputs, x_stride, weight_stride,
    K: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SLICES: tl.constexpr, STAGES: tl.constexpr,
    HALF: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN rows of the matrix, the left operand, and BM of x. SLICES warps share the columns, BK each a round, and add up
    their sums at the end. Without HALF the products are of float32."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    slices = tl.arange(0, SLICES)[:, None, None] * BK
    weight_k, x_k = slices + tl.arange(0, BK)[None, None, :], slices + tl.arange(0, BK)[None, :, None]
    weight_ptr += tl.minimum(n, outputs - 1).to(tl.int64)[None, :, None] * weight_stride
    x_ptr += tl.minimum(m, rows - 1).to(tl.int64)[None, None, :] * x_stride
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sums = tl.zeros((SLICES, BN, BM), tl.float32)
    for first in tl.range(0, K, SLICES * BK, num_stages=STAGES):
        weight = _block(weight_ptr, first + weight_k, K, SLICES * BK)
        x = _block(x_ptr, first + x_k, K, SLICES * BK)
        if HALF:
            sums = tl.dot(weight, x, sums)
        else:
            sums = tl.dot(weight.to(tl.float32), x.to(tl.float32), sums, input_precision="ieee")
    total = tl.sum(sums, 0)

    target = m.to(tl.int64)[None, :] * outputs + n[:, None]
    kept = (n < outputs)[:, None] & (m < rows)[None, :]
    if BIAS:
        total += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    if RESIDUAL:
        total += tl.load(residual_ptr + target, mask=kept, other=0.0).to(tl.float32)
    tl.store(out_ptr + target, total.to(out_ptr.dtype.element_ty), mask=kept)
