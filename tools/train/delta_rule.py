"""The gated delta rule with gradients: flash-linear-attention's kernels on CUDA, chunks in plain torch elsewhere."""

import torch
from torch import Tensor

CHUNK = 64


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, row_length: int) -> Tensor:
    """q, k [N, key_heads, K], v [N, value_heads, V], g float32 log decay and beta [N, value_heads], in rows of
    row_length which do not see each other -> o like v. Value head j reads key head j * key_heads // value_heads."""
    if v.is_cuda:
        return chunked_on_cuda(q, k, v, g, beta, row_length)
    return chunked(q, k, v, g, beta, row_length)


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, row_length: int) -> Tensor:
    """The definition, token by token in float32: S <- exp(g) S; u = beta (v - k S); S <- S + k^T u; o = q S / sqrt(K);
    q and k l2-normalised (eps 1e-6). The oracle of the other two."""
    groups = v.shape[1] // k.shape[1]
    shape, dtype = v.shape, v.dtype
    q, k, v, g, beta = (t.view(-1, row_length, *t.shape[1:]).float() for t in (q, k, v, g, beta))
    q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    q, k = q.repeat_interleave(groups, 2), k.repeat_interleave(groups, 2)
    q = q / q.shape[-1] ** 0.5
    decay, beta = g.exp()[..., None, None], beta[..., None]
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    outputs = []
    for t in range(row_length):
        state = state * decay[:, t]
        key = k[:, t, ..., None]
        update = beta[:, t] * (v[:, t] - (key * state).sum(-2))
        state = state + key * update[..., None, :]
        outputs.append((q[:, t, ..., None] * state).sum(-2))
    return torch.stack(outputs, 1).reshape(shape).to(dtype)


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, row_length: int) -> Tensor:
    """As `recurrent`, 64 tokens at once. With G the sum of g from the chunk's start and S the state before it, the
    updates u of a chunk solve u_i + beta_i sum_{j<i} e^(G_i - G_j) (k_i k_j) u_j = beta_i (v_i - e^(G_i) k_i S)."""
    shape, dtype = v.shape, v.dtype
    value_heads = v.shape[1]
    padding = -row_length % CHUNK  # tokens of beta 0 and decay 1: they change nothing

    def chunks(t: Tensor) -> Tensor:
        """[N, heads, ...] -> float32 [rows, value_heads, chunks, CHUNK, ...]"""
        t = t.view(-1, row_length, *t.shape[1:]).float()
        t = torch.cat([t, t.new_zeros(t.shape[0], padding, *t.shape[2:])], 1).transpose(1, 2)
        return t.repeat_interleave(value_heads // t.shape[1], 1).unflatten(2, (-1, CHUNK))

    q, k, v, g, beta = (chunks(t) for t in (q, k, v, g, beta))
    q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    q = q / q.shape[-1] ** 0.5
    total = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    system = (beta[..., None] * decay * (k @ k.mT)).tril(-1) + torch.eye(CHUNK, device=q.device)
    right = beta[..., None] * torch.cat([v, total.exp()[..., None] * k], -1)
    from_values, from_state = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), -1
    )
    within = decay * (q @ k.mT)
    q = total.exp()[..., None] * q
    k = (total[..., -1:] - total).exp()[..., None] * k
    last = total[..., -1].exp()[..., None, None]
    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    outputs: list[Tensor] = []
    for chunk in range(v.shape[2]):
        u = from_values[:, :, chunk] - from_state[:, :, chunk] @ state
        outputs.append(q[:, :, chunk] @ state + within[:, :, chunk] @ u)
        state = last[:, :, chunk] * state + k[:, :, chunk].mT @ u
    return torch.cat(outputs, 2)[:, :, :row_length].transpose(1, 2).reshape(shape).to(dtype)


def chunked_on_cuda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, row_length: int) -> Tensor:
    """As `delta_rule`. Call `hopper.prepare()` before the first time."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyrefly: ignore[missing-import]

    rows = (t.view(-1, row_length, *t.shape[1:]) for t in (q, k, v, g, beta))
    o, _ = chunk_gated_delta_rule(*rows, use_qk_l2norm_in_kernel=True)
    return o.reshape(v.shape)


def gradient_errors(device: torch.device, tokens: int = 512, row_length: int = 256) -> dict[str, float]:
    """Relative error (norm of the difference / norm) of the fast path's output and gradients on bf16 inputs against the
    recurrence. On an H200 below 0.01; a kernel that this machine's Triton compiles wrongly shows here."""
    generator = torch.Generator().manual_seed(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, torch.bfloat16)

    names = ("q", "k", "v", "g", "beta")
    inputs = [normal(tokens, 2, 64), normal(tokens, 2, 64), normal(tokens, 4, 64)]
    inputs.append((torch.rand(tokens, 4, generator=generator) * -0.2).to(device))
    inputs.append(torch.rand(tokens, 4, generator=generator).to(device, torch.bfloat16))
    upstream = normal(tokens, 4, 64)
    results: list[list[Tensor]] = []
    for rule in (delta_rule, recurrent):
        leaves = [t.clone().requires_grad_() for t in inputs]
        q, k, v, g, beta = leaves
        o = rule(q, k, v, g, beta, row_length)
        o.backward(upstream)
        results.append([o.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    return {
        name: ((fast.float() - exact.float()).norm() / exact.float().norm()).item()
        for name, fast, exact in zip(("o", *names), *results, strict=True)
    }
