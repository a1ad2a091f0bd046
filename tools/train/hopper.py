"""What flash-linear-attention 0.6 needs on CUDA before its first call: one configuration a kernel, a right gradient."""

import importlib

import torch
from torch import Tensor

CHUNK = 64


def prepare() -> None:
    """Changes the imported library in this process; call once, on a machine with CUDA."""
    import triton
    from triton.runtime.autotuner import Autotuner

    # The search over configurations takes about 2 minutes on an H200, a whole training about 10: take the middle one.
    original = Autotuner.__init__

    def first_configuration(self, fn, arg_names, configs, *args, **kwargs):
        ranked = sorted(
            configs or [],
            key=lambda c: (
                abs(c.num_warps - 4),
                abs(c.num_stages - 3),
                abs(c.kwargs.get("BV", 32) - 32),
                abs(c.kwargs.get("BK", 64) - 64),
            ),
        )
        original(self, fn, arg_names, ranked[:1] or configs, *args, **kwargs)

    Autotuner.__init__ = first_configuration
    library = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    version = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in triton.__version__.split(".")[:3])
    # Its kernel computes wrong gradients there, so the library refuses to run it (its issue 640).
    if torch.cuda.get_device_capability()[0] == 9 and (3, 4) <= version < (3, 7, 1):
        setattr(library, "chunk_bwd_dqkwg", torch.compile(chunk_gradients, dynamic=False))  # noqa: B010


def chunk_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    h: Tensor,
    dh: Tensor,
    w: Tensor | None = None,
    g: Tensor | None = None,
    dv: Tensor | None = None,
    scale: float | None = None,
    **_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The part of the gated delta rule's backward that is local to a chunk, in plain torch: flash-linear-attention's
    `chunk_bwd_dqkwg`. q, k [B, T, H, K], v, do, dv [B, T, HV, V], h, dh [B, T / 64, HV, K, V], g [B, T, HV] log2 decay
    summed within chunks of 64; T % 64 == 0 -> dq, dk [B, T, H, K], dw [B, T, HV, K], dg float32 [B, T, HV]."""
    if g is None or dv is None or scale is None:
        raise ValueError("this stands in for the gated kernel only")
    batch, tokens, heads, key_dim = k.shape
    value_heads, value_dim = v.shape[2:]
    chunks = batch * tokens // CHUNK
    groups = value_heads // heads
    dtype = k.dtype

    def chunked(x: Tensor) -> Tensor:
        return x.reshape(chunks, CHUNK, x.shape[2], x.shape[3]).transpose(1, 2)

    def unchunked(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(batch, tokens, value_heads, -1)

    def summed_over_group(x: Tensor) -> Tensor:
        return unchunked(x).view(batch, tokens, heads, groups, key_dim).sum(3).to(dtype)

    q, k = chunked(q).repeat_interleave(groups, 1), chunked(k).repeat_interleave(groups, 1)
    v, do, dv = chunked(v).to(dtype), chunked(do).to(dtype), chunked(dv).to(dtype)
    h, dh = (x.reshape(chunks, value_heads, key_dim, value_dim) for x in (h, dh))
    g = g.float().reshape(chunks, CHUNK, value_heads).transpose(1, 2)
    total = g[..., -1:]

    # through the state: what earlier chunks left (h) and what later ones want (dh)
    dq = (do @ h.to(dtype).mT).float() * torch.exp2(g)[..., None] * scale
    dk = (v @ dh.to(dtype).mT).float() * torch.exp2(total - g)[..., None]
    dw = -(dv @ h.to(dtype).mT)
    d_total = (h.float() * dh.float()).sum((-1, -2)) * torch.exp2(total[..., 0]) + (dk * k.float()).sum((-1, -2))

    # within the chunk: position i reads j <= i, decayed by 2^(g_i - g_j)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = torch.exp2((g[..., :, None] - g[..., None, :]).masked_fill(~causal, float("-inf")))
    ds = ((do @ v.mT).float() * decay * scale).to(dtype)
    dq = dq + (ds @ k).float()
    dk = dk + (ds.mT @ q).float()
    dg = (dq * q.float()).sum(-1) - (dk * k.float()).sum(-1)
    dg = torch.cat([dg[..., :-1], dg[..., -1:] + d_total[..., None]], -1)
    return (
        summed_over_group(dq),
        summed_over_group(dk),
        unchunked(dw).contiguous(),
        dg.transpose(1, 2).reshape(batch, tokens, value_heads).contiguous(),
    )
