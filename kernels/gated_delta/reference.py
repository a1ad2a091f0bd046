"""Plain torch, any device. `recurrent` is the oracle; `chunked` and `single` are what a CPU serves with.

States may be float16 or bfloat16 here as in `gated_delta.decode`: all is computed in float32, outputs are of states
before they are rounded, and a sequence's state is rounded once in a call, when it is stored (`rounded`)."""

import torch
from torch import Tensor

from kernels.state_plan import StatePlan, StateSpan

CHUNK = 64
_EPS = 1e-6


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, plan: StatePlan, out: Tensor
) -> None:
    """All sequences of `plan`, token by token."""
    qn, kn = _normalised(q, k, v.shape[1])
    decay, beta = g.exp()[..., None, None], beta[..., None]
    singles = zip(plan.singles.tolist(), plan.slots.tolist(), strict=True)
    for span in (*plan.spans, *(StateSpan(token, 1, slot) for token, slot in singles)):
        state = wide(states[span.slot])
        for token in range(span.first, span.first + span.count):
            state = decay[token] * state
            update = beta[token] * (v[token].float() - (kn[token, :, :, None] * state).sum(1))
            state = state + kn[token, :, :, None] * update[:, None]
            out[token] = (qn[token, :, :, None] * state).sum(1)
        states[span.slot] = rounded(state, states.dtype)


def single(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, plan: StatePlan, out: Tensor
) -> None:
    """The singles of `plan`, all at once."""
    tokens = plan.singles
    state = wide(states[plan.slots])
    o = step(q[tokens], k[tokens], v[tokens], g[tokens], beta[tokens], state)
    states[plan.slots] = rounded(state, states.dtype)
    out[tokens] = o.to(out.dtype)


def step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """A token each of B sequences: their states [B, value_heads, K, V], float32 or float64, in place. Returns o [B,
    value_heads, V] of the states' dtype."""
    qn, kn = _normalised(q, k, v.shape[1])
    state *= g.exp()[:, :, None, None]
    update = beta[:, :, None] * (wide(v) - (kn[:, :, None] @ state)[:, :, 0])
    state += kn[..., None] * update[:, :, None]
    return (qn[:, :, None] @ state)[:, :, 0]


def wide(x: Tensor) -> Tensor:
    """In float32, or float64 where it is."""
    return x if x.dtype == torch.float64 else x.float()


def rounded(state: Tensor, kind: torch.dtype) -> Tensor:
    """A float32 or float64 state as it is stored. float16 saturates: a state that became infinite would stay so."""
    stored = state.to(kind)
    if kind == torch.float16:
        # Behind the rounding, where it takes half the memory; what overflowed is infinite until here.
        largest = torch.finfo(kind).max
        stored = stored.clamp(-largest, largest)
    return stored


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, plan: StatePlan, out: Tensor
) -> None:
    """The spans of `plan`, 64 tokens at once."""
    for span in plan.spans:
        tokens = slice(span.first, span.first + span.count)
        out[tokens] = _span(q[tokens], k[tokens], v[tokens], g[tokens], beta[tokens], states, span)


def _span(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, span: StateSpan) -> Tensor:
    """With G the sum of g from the chunk's start to a token and S the state before the chunk, the updates u of a chunk
    solve u_i + beta_i sum_{j<i} e^(G_i - G_j) (k_i k_j) u_j = beta_i (v_i - e^(G_i) k_i S). The system is solved for
    all chunks at once, with the right side's two terms apart, so that only small products wait for S."""
    heads, value_dim = v.shape[1:]
    size = min(CHUNK, span.count)
    padding = -span.count % size  # tokens of beta 0 and decay 1: they change nothing

    def chunks(x: Tensor) -> Tensor:
        """[count, heads, ...] -> float32 [heads, chunks, size, ...]"""
        wide = x.float().transpose(0, 1)
        if padding:
            wide = torch.cat((wide, wide.new_zeros(wide.shape[0], padding, *wide.shape[2:])), dim=1)
        return wide.unflatten(1, (-1, size))

    qn, kn = (chunks(x) for x in _normalised(q, k, heads))
    vc, gc, bc = chunks(v), chunks(g), chunks(beta)[..., None]
    total = gc.cumsum(-1)
    growth = total.exp()[..., None]
    lower = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    # Masked before the exponential: above the diagonal it may overflow.
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    system = bc * decay * (kn @ kn.mT)  # only what is below the diagonal is read
    solved = torch.linalg.solve_triangular(
        system, bc * torch.cat((vc, growth * kn), dim=-1), upper=False, unitriangular=True
    )
    from_values, from_state = solved[..., :value_dim], solved[..., value_dim:]
    within = decay * (qn @ kn.mT)
    reading = growth * qn
    writing = ((total[..., -1:] - total).exp()[..., None] * kn).mT
    kept = total[..., -1].exp()[..., None, None]

    state = states[span.slot].float()
    outputs = []
    for chunk in range(vc.shape[1]):
        update = torch.baddbmm(from_values[:, chunk], from_state[:, chunk], state, alpha=-1)
        outputs.append(torch.baddbmm(reading[:, chunk] @ state, within[:, chunk], update))
        state = torch.baddbmm(kept[:, chunk] * state, writing[:, chunk], update)
    states[span.slot] = rounded(state, states.dtype)
    return torch.cat(outputs, dim=1)[:, : span.count].transpose(0, 1).to(v.dtype)


def _normalised(q: Tensor, k: Tensor, value_heads: int) -> tuple[Tensor, Tensor]:
    """[..., value_heads, K], float32 or float64: both l2-normalised, q divided by sqrt(K) as well."""
    q, k = wide(q), wide(k)
    q = q * (torch.rsqrt(q.square().sum(-1, keepdim=True) + _EPS) * q.shape[-1] ** -0.5)
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + _EPS)
    groups = value_heads // k.shape[-2]
    if groups == 1:
        return q, k
    return q.repeat_interleave(groups, dim=-2), k.repeat_interleave(groups, dim=-2)
