"""The pieces of the model as pure functions of flat activations.

N tokens of all rows follow each other, [N, ...]; only `delta_rule` and `causal_attention` see rows. With N fixed, every
piece compiles once for all row lengths. Weights are float32 and are cast to the activations' dtype where they are used.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.train.shape import CONV_WIDTH, RMS_NORM_EPS

Weights = dict[str, Tensor]
"""The parameters of one layer, by their names within the layer."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where each of N tokens stands in its row."""

    positions: Tensor
    """int64 [N], from 0."""
    cos: Tensor
    """float32 [N, rotary_dims / 2]"""
    sin: Tensor


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x / rms(x) * (1 + weight) over the last dim, computed in float32, in x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + RMS_NORM_EPS) * (1.0 + weight)).to(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def feed_forward(x: Tensor, layer: Weights) -> Tensor:
    """x + SwiGLU(norm(x)); x [N, hidden]."""
    h = rms_norm(x, layer["post_attention_layernorm.weight"])
    inner = F.silu(linear(h, layer["mlp.gate_proj.weight"])) * linear(h, layer["mlp.up_proj.weight"])
    return x + linear(inner, layer["mlp.down_proj.weight"])


def delta_inputs(
    x: Tensor, positions: Tensor, layer: Weights, key_width: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [N, hidden] -> q, k [N, key_heads, head_dim], v, z [N, value_heads, head_dim], log decay g float32 and beta
    [N, value_heads]. The causal convolution (width 4, then SiLU) does not reach over the start of a row."""
    h = rms_norm(x, layer["input_layernorm.weight"])
    n = x.shape[0]
    mixed = linear(h, layer["linear_attn.in_proj_qkv.weight"])
    taps = layer["linear_attn.conv1d.weight"][:, 0].float()
    y = mixed.float() * taps[:, CONV_WIDTH - 1]
    for back in range(1, CONV_WIDTH):
        earlier = F.pad(mixed, (0, 0, back, 0))[:n].float()
        y = y + torch.where((positions >= back)[:, None], earlier, 0.0) * taps[:, CONV_WIDTH - 1 - back]
    y = F.silu(y).to(x.dtype)
    q, k, v = (part.reshape(n, -1, head_dim) for part in y.tensor_split((key_width, 2 * key_width), dim=1))
    step = F.softplus(linear(h, layer["linear_attn.in_proj_a.weight"]).float() + layer["linear_attn.dt_bias"])
    g = -layer["linear_attn.A_log"].exp() * step
    beta = torch.sigmoid(linear(h, layer["linear_attn.in_proj_b.weight"]))
    z = linear(h, layer["linear_attn.in_proj_z.weight"]).reshape(n, -1, head_dim)
    return q.contiguous(), k.contiguous(), v.contiguous(), z, g, beta


def delta_output(x: Tensor, o: Tensor, z: Tensor, layer: Weights) -> Tensor:
    """The rest of a delta-net layer: x + out_proj(RMSNorm(o) * SiLU(z)), then feed-forward; o, z [N, heads, dim]."""
    wide = o.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + RMS_NORM_EPS) * layer["linear_attn.norm.weight"]
    gated = (wide * F.silu(z.float())).to(x.dtype).reshape(x.shape[0], -1)
    return feed_forward(x + linear(gated, layer["linear_attn.out_proj.weight"]), layer)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first dims of each head; x [N, heads, head_dim], dim i turns with dim i + rotary / 2."""
    half = cos.shape[1]
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    c, s = cos[:, None], sin[:, None]
    return torch.cat([(a * c - b * s).to(x.dtype), (b * c + a * s).to(x.dtype), x[..., 2 * half :]], -1)


def attention_inputs(
    x: Tensor, cos: Tensor, sin: Tensor, layer: Weights, kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [N, hidden] -> q [N, heads, head_dim], k, v [N, kv_heads, head_dim], gate [N, heads * head_dim]."""
    h = rms_norm(x, layer["input_layernorm.weight"])
    n = x.shape[0]
    query_and_gate = linear(h, layer["self_attn.q_proj.weight"]).view(n, -1, 2 * head_dim)
    q, gate = query_and_gate.split(head_dim, dim=-1)
    q = rms_norm(q, layer["self_attn.q_norm.weight"])
    k = rms_norm(
        linear(h, layer["self_attn.k_proj.weight"]).view(n, kv_heads, head_dim), layer["self_attn.k_norm.weight"]
    )
    v = linear(h, layer["self_attn.v_proj.weight"]).view(n, kv_heads, head_dim)
    return rotate(q, cos, sin), rotate(k, cos, sin), v, gate.reshape(n, -1)


def attention_output(x: Tensor, o: Tensor, gate: Tensor, layer: Weights) -> Tensor:
    """The rest of an attention layer: x + o_proj(o * sigmoid(gate)), then the feed-forward; o [N, heads * head_dim]."""
    return feed_forward(x + linear(o * torch.sigmoid(gate), layer["self_attn.o_proj.weight"]), layer)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, row_length: int) -> Tensor:
    """q [N, heads, dim], k, v [N, kv_heads, dim] in rows of row_length -> [N, heads * dim]; each row by itself."""
    n, heads = q.shape[:2]
    groups = heads // k.shape[1]

    def rows(t: Tensor) -> Tensor:
        return t.view(n // row_length, row_length, *t.shape[1:]).transpose(1, 2)

    q, k, v = rows(q), rows(k).repeat_interleave(groups, 1), rows(v).repeat_interleave(groups, 1)
    if q.is_cuda:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # the others plan anew for each row length, or keep T x T scores
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return o.transpose(1, 2).reshape(n, -1)


def mtp_input(h: Tensor, embedded: Tensor, hidden_norm: Tensor, embedding_norm: Tensor, fc: Tensor) -> Tensor:
    """fc(concat[norm(embedding of the following token), norm(h)]); all [N, hidden]."""
    return linear(torch.cat([rms_norm(embedded, embedding_norm), rms_norm(h, hidden_norm)], -1), fc)


def head_loss(x: Tensor, norm: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Final norm, head, cross entropy summed with weights. x [N, hidden], targets int64 [N], weights float32 [N]
    -> (loss float32 [], normed hidden [N, hidden])."""
    h = rms_norm(x, norm)
    logits = linear(h, head).float()
    losses = torch.logsumexp(logits, -1) - logits.gather(1, targets[:, None])[:, 0]
    return (losses * weights).sum(), h


@dataclass(frozen=True, slots=True)
class Pieces:
    """The functions above as the model calls them: plain, or compiled for one N."""

    delta_inputs: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]] = delta_inputs
    delta_output: Callable[..., Tensor] = delta_output
    attention_inputs: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = attention_inputs
    attention_output: Callable[..., Tensor] = attention_output
    mtp_input: Callable[..., Tensor] = mtp_input
    head_loss: Callable[..., tuple[Tensor, Tensor]] = head_loss

    @classmethod
    def compiled(cls) -> "Pieces":
        return cls(
            delta_inputs=torch.compile(delta_inputs, dynamic=False),
            delta_output=torch.compile(delta_output, dynamic=False),
            attention_inputs=torch.compile(attention_inputs, dynamic=False),
            attention_output=torch.compile(attention_output, dynamic=False),
            mtp_input=torch.compile(mtp_input, dynamic=False),
            head_loss=torch.compile(head_loss, dynamic=False),
        )


PLAIN = Pieces()
