# pyrefly: ignore-errors
"""The kernels; `replay` starts them and says what they do.

`stream` and `fold` must give equal bits, so both are made of the functions below, compiled without contraction to fused
multiply-adds but where one is written, and started with the same launch: then a sum over the keys takes the same tree.
"""

import triton
import triton.language as tl

_EPS = tl.constexpr(1e-6)


@triton.jit
def softplus(x):
    """log(1 + e^x), with full relative precision also where e^x is far below 1: w = 1 + e is rounded, and e / (w - 1)
    takes the error back (Goldberg 1991, theorem 4)."""
    e = tl.exp(tl.minimum(x, 20.0))
    w = 1.0 + e
    least = w == 1.0
    value = tl.where(least, e, tl.log(w) * (e / tl.where(least, 1.0, w - 1.0)))
    return tl.where(x > 20.0, x, value)


@triton.jit
def _key(pointer, D: tl.constexpr, BD: tl.constexpr):
    """float32 [BD], as it lies there; zeros behind."""
    d = tl.arange(0, BD)
    if BD == D:
        return tl.load(pointer + d).to(tl.float32)
    else:
        return tl.load(pointer + d, mask=d < D, other=0.0).to(tl.float32)


@triton.jit
def _unit(x, factor):
    """l2-normalised, times the factor."""
    return x * (tl.rsqrt(tl.sum(x * x, 0) + _EPS) * factor)


@triton.jit
def _values(pointer, tile, V: tl.constexpr, BV: tl.constexpr):
    """float32 [BV]"""
    n = tile * BV + tl.arange(0, BV)
    if V % BV == 0:
        return tl.load(pointer + n).to(tl.float32)
    else:
        return tl.load(pointer + n, mask=n < V, other=0.0).to(tl.float32)


@triton.jit
def _gate(pointer):
    return tl.load(pointer).to(tl.float32)


@triton.jit
def _update(state, k, v, g, beta):
    """state [BK, BV] after a token."""
    state = tl.exp(g) * state
    u = beta * (v - tl.sum(k[:, None] * state, 0))
    return tl.fma(k[:, None] + tl.zeros_like(state), u[None, :] + tl.zeros_like(state), state)


@triton.jit
def _rounded(state, kind: tl.constexpr):
    """As it is when it has been stored and loaded. By comparisons, which leave NaN what it is."""
    if kind == tl.float32:
        return state
    else:
        if kind == tl.float16:
            state = tl.where(state > 65504.0, 65504.0, tl.where(state < -65504.0, -65504.0, state))
        return state.to(kind).to(tl.float32)


@triton.jit
def _spots(tile, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Offsets [BK, BV] in a head's state, and which of them exist."""
    k = tl.arange(0, BK)
    n = tile * BV + tl.arange(0, BV)
    return k[:, None] * V + n[None, :], (k < K)[:, None] & (n < V)[None, :]


@triton.jit
def _loaded(pointer, spots, inside, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(pointer + spots).to(tl.float32)
    else:
        return tl.load(pointer + spots, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, spots, inside, state, WHOLE: tl.constexpr):
    state = state.to(pointer.dtype.element_ty)
    if WHOLE:
        tl.store(pointer + spots, state)
    else:
        tl.store(pointer + spots, state, mask=inside)


@triton.jit
def stream(
    q_ptr, kv_ptr, a_ptr, b_ptr, a_log_ptr, bias_ptr, states_ptr, slots_ptr, tokens_ptr, counts_ptr, places_ptr,
    out_ptr, g_ptr, beta_ptr, factor,
    slot_stride, q_stride, kv_stride, a_stride, b_stride, out_stride, gate_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    RECORD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Columns program_id(0) of the state of value head program_id(1) of sequence program_id(2). Without RECORD there is
    one row a sequence, and the state moves on; with it the state stays, and g and beta are kept.

    kv_ptr: a row is k [HEADS / GROUP, K] and v [HEADS, V]. factor: of q."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    WHOLE: tl.constexpr = BK == K and V % BV == 0
    kind: tl.constexpr = states_ptr.dtype.element_ty
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    if slot < 0:
        if PDL:  # by all programs: what comes after this kernel relies on the one before, too
            tl.extra.cuda.gdc_wait()
        return
    spots, inside = _spots(tile, K, V, BK, BV)
    pointer = states_ptr + slot * slot_stride + head * (K * V)
    state = _loaded(pointer, spots, inside, WHOLE)  # before the wait: the kernel before writes no states
    token = tl.load(tokens_ptr + sequence).to(tl.int64)
    place = sequence.to(tl.int64)
    count = 1
    if RECORD:
        place = tl.load(places_ptr + sequence).to(tl.int64)
        count = tl.load(counts_ptr + sequence)
    negative = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    bias = tl.load(bias_ptr + head).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if RECORD and count <= 0:
        return
    n = tile * BV + tl.arange(0, BV)
    out = out_ptr + head * V + n
    q_ptr += (head // GROUP) * K
    k_ptr = kv_ptr + (head // GROUP) * K
    v_ptr = kv_ptr + (HEADS // GROUP) * K + head * V

    # All loads before what waits for the first of them, here and in the loops below.
    q = _key(q_ptr + place * q_stride, K, BK)
    k = _key(k_ptr + place * kv_stride, K, BK)
    v = _values(v_ptr + place * kv_stride, tile, V, BV)
    a = _gate(a_ptr + token * a_stride + head)
    b = _gate(b_ptr + token * b_stride + head)
    q, k = _unit(q, factor), _unit(k, 1.0)
    g, beta = negative * softplus(a + bias), tl.sigmoid(b)
    if RECORD:
        for row in tl.range(0, count):
            after = tl.minimum(row + 1, count - 1)  # behind the last row it is the last once more
            next_q = _key(q_ptr + (place + after) * q_stride, K, BK)
            next_k = _key(k_ptr + (place + after) * kv_stride, K, BK)
            next_v = _values(v_ptr + (place + after) * kv_stride, tile, V, BV)
            a = _gate(a_ptr + (token + after) * a_stride + head)
            b = _gate(b_ptr + (token + after) * b_stride + head)
            if tile == 0:
                tl.store(g_ptr + (place + row) * gate_stride + head, g)
                tl.store(beta_ptr + (place + row) * gate_stride + head, beta)
            state = _update(state, k, v, g, beta)
            o = tl.sum(q[:, None] * state, 0)
            tl.store(out + (token + row) * out_stride, o.to(out_ptr.dtype.element_ty), mask=n < V)
            state = _rounded(state, kind)
            q, k, v = _unit(next_q, factor), _unit(next_k, 1.0), next_v
            g, beta = negative * softplus(a + bias), tl.sigmoid(b)
    else:
        state = _update(state, k, v, g, beta)
        o = tl.sum(q[:, None] * state, 0)
        tl.store(out + token * out_stride, o.to(out_ptr.dtype.element_ty), mask=n < V)
        _store(pointer, spots, inside, _rounded(state, kind), WHOLE)


@triton.jit
def fold(
    kv_ptr, g_ptr, beta_ptr, states_ptr, slots_ptr, places_ptr, accepted_ptr,
    slot_stride, state_layer_stride, kv_stride, kv_layer_stride, gate_stride, gate_layer_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """As `stream` of one row after the other; program_id(1) counts the heads of all layers."""
    tile = tl.program_id(0)
    layer = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    sequence = tl.program_id(2)
    WHOLE: tl.constexpr = BK == K and V % BV == 0
    kind: tl.constexpr = states_ptr.dtype.element_ty
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    accepted = tl.load(accepted_ptr + sequence)
    if slot < 0 or accepted <= 0:
        return
    spots, inside = _spots(tile, K, V, BK, BV)
    pointer = states_ptr + slot * slot_stride + layer * state_layer_stride + head * (K * V)
    state = _loaded(pointer, spots, inside, WHOLE)
    place = tl.load(places_ptr + sequence).to(tl.int64)
    k_ptr = kv_ptr + layer * kv_layer_stride + place * kv_stride + (head // GROUP) * K
    v_ptr = kv_ptr + layer * kv_layer_stride + place * kv_stride + (HEADS // GROUP) * K + head * V
    g_ptr += layer * gate_layer_stride + place * gate_stride + head
    beta_ptr += layer * gate_layer_stride + place * gate_stride + head

    k = _unit(_key(k_ptr, K, BK), 1.0)
    v = _values(v_ptr, tile, V, BV)
    g = tl.load(g_ptr)
    beta = tl.load(beta_ptr)
    for row in tl.range(0, accepted):
        after = tl.minimum(row + 1, accepted - 1)
        next_k = _key(k_ptr + after * kv_stride, K, BK)
        next_v = _values(v_ptr + after * kv_stride, tile, V, BV)
        next_g = tl.load(g_ptr + after * gate_stride)
        next_beta = tl.load(beta_ptr + after * gate_stride)
        state = _rounded(_update(state, k, v, g, beta), kind)
        k, v, g, beta = _unit(next_k, 1.0), next_v, next_g, next_beta
    _store(pointer, spots, inside, state, WHOLE)
