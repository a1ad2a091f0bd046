"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks"), over many sequences with a state each.

T: tokens of a step. K, V: dims of a key and of a value head. Value head h reads key head h * key_heads // value_heads.
With q and k l2-normalised (x / sqrt(sum x^2 + 1e-6)), for each value head and token, in float32:

    S <- exp(g) S;  u = beta (v - k S);  S <- S + k^T u;  o = q S / sqrt(K)

`gated_delta` takes tokens behind the convolution. The others are convolution and rule together: `prefill` for spans of
tokens, `decode`, `verify` and `fold` for few tokens a sequence.
"""

import torch
from torch import Tensor

from kernels.conv import causal_conv
from kernels.gated_delta import flash, reference, replay_reference
from kernels.gated_delta.net import NetInputs, NetWeights, Records, gates
from kernels.state_plan import ReplayRows, StatePlan, plan_recurrence


def prefill(
    inputs: NetInputs, net: NetWeights, columns: Tensor, states: Tensor, plan: StatePlan, inner: torch.dtype
) -> Tensor:
    """The spans of `plan`, of which there is one at least, from the convolution's input to o. Returns o of dtype
    `inner` [T, value_heads, V], contiguous, in which the rows of other tokens hold anything.

    columns [slots, W - 1, channels] and states [slots, value_heads, K, V], one layer's views of the state pool, are
    moved on in place; states of 16 bits are rounded once a span. On CUDA one launch, and flash-linear-attention's
    chunked form of the rule where it is installed and takes `inner`, else plain torch.
    """
    if states.is_cuda:
        from kernels.gated_delta import spans  # triton exists on Linux only

        return spans.prefill(inputs, net, columns, states, plan, inner)
    plan = plan.without_singles()
    mixed = causal_conv(inputs.mixed, net.taps, columns, plan, inner)
    q, k, v = mixed.split((net.key_width, net.key_width, mixed.shape[1] - 2 * net.key_width), dim=-1)
    g, beta = gates(inputs.a, inputs.b, net)
    out = torch.empty(len(mixed), net.value_heads, net.value_dim, dtype=inner, device=mixed.device)
    reference.chunked(
        q.unflatten(-1, (net.key_heads, net.key_dim)),
        k.unflatten(-1, (net.key_heads, net.key_dim)),
        v.unflatten(-1, (net.value_heads, net.value_dim)),
        g,
        beta,
        states,
        plan,
        out,
    )
    return out


def gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, plan: StatePlan) -> Tensor:
    """q, k [T, key_heads, K] and v [T, value_heads, V] of one float dtype, not normalised. g (the logarithm of the
    decay, at most 0) and beta: float32 [T, value_heads]. states: float32 [slots, value_heads, K, V], one layer's view
    of the state pool: S before the step, in place S behind it. Returns o like v.

    Sequences with one token in the step take the rule as it stands, longer ones its chunked form: flash-linear-
    attention's kernel where it is installed and takes these tensors (CUDA, half precision), else plain torch.
    """
    out = v.new_empty(v.shape)
    if plan.packed is not None:
        chunked = flash.chunked if flash.usable(q) else reference.chunked
        chunked(q, k, v, g, beta, states, plan, out)
    if len(plan.singles):
        reference.single(q, k, v, g, beta, states, plan, out)
    return out


def decode(
    inputs: NetInputs, net: NetWeights, columns: Tensor, states: Tensor, slots: Tensor, tokens: Tensor, out: Tensor
) -> None:
    """One token each of B sequences, from the convolution's input to o. slots, tokens int64 [B]: sequence i has row
    tokens[i] of the step and slot slots[i]; no slot occurs twice, and a negative one is nobody's (of a captured graph):
    it is left out.

    columns [slots, W - 1, channels] and states [slots, value_heads, K, V], one layer's views of the state pool, are
    moved on in place. States are float32, or float16 or bfloat16: then a state is rounded once a token, when it is
    stored, and the token's output is of the state before; float16 saturates. After 16K tokens o is then off by 0.2%
    (float16) or 2% (bfloat16) in heads that hardly forget, by 0.4% or 7% where they write weakly too
    (docs/benchmarks/gated-delta-cpu.json). out [T, value_heads, V], contiguous: only the B rows are written; its dtype
    is that of q, k and v behind the convolution.

    On CUDA two launches of Triton kernels, which read and write every element of the B states once.
    """
    if states.is_cuda:
        from kernels.gated_delta import replay  # triton exists on Linux only

        replay.decode(inputs, net, columns, states, slots, tokens, out)
    else:
        replay_reference.decode(inputs, net, columns, states, slots, tokens, out)


def verify(
    inputs: NetInputs,
    net: NetWeights,
    columns: Tensor,
    states: Tensor,
    rows: ReplayRows,
    records: Records,
    layer: int,
    out: Tensor,
) -> None:
    """Several tokens a sequence, each behind the one before, without writing columns or states: they, and `out`, are as
    for `decode`. What `fold` needs goes to the records of `layer`.

    Outputs are bit for bit those of `decode` token by token, and so are states and columns after `fold`, on CUDA where
    the widths of q, k and v are multiples of 16 (else the compiler may add up their sums in another order).
    """
    if states.is_cuda:
        from kernels.gated_delta import replay

        replay.verify(inputs, net, columns, states, rows, records, layer, out)
    else:
        replay_reference.verify(inputs, net, columns, states, rows, records, layer, out)


def fold(
    net: NetWeights,
    columns: Tensor,
    states: Tensor,
    slots: Tensor,
    places: Tensor,
    accepted: Tensor,
    records: Records,
) -> None:
    """Move columns [slots, layers, W - 1, channels] and states [slots, layers, value_heads, K, V] of all layers on, in
    place, by the first accepted[i] (int32 [B]) of the records of sequence i, which begin at row places[i] (int64 [B]).
    0, or a negative slot: nothing is touched. Later records are not read. net: of any layer, for its shapes.

    On CUDA two launches in all.
    """
    if states.is_cuda:
        from kernels.gated_delta import replay

        replay.fold(net, columns, states, slots, places, accepted, records)
    else:
        replay_reference.fold(net, columns, states, slots, places, accepted, records)


def prepare(
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    conv_width: int,
    inner: torch.dtype,
    model: torch.dtype,
    device: torch.device,
) -> None:
    """Have kernels for such tensors compiled and tuned now and not in the first request: flash-linear-attention takes a
    minute for a new shape (63 s for the 27B's on an H200), `decode` some seconds. inner: of q, k and v. model: of the
    weights and the convolution's columns. On a CPU there is nothing to do."""
    if device.type != "cuda":
        return
    counts = (65, 130)
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    net = NetWeights(
        taps=torch.zeros(conv_width, channels, dtype=model, device=device),
        a_log=torch.zeros(value_heads, device=device),
        dt_bias=torch.zeros(value_heads, device=device),
        key_heads=key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )
    mixed = torch.zeros(sum(counts), channels + value_heads * value_dim, device=device)[:, :channels]
    b, a = torch.zeros(sum(counts), 2 * value_heads, device=device).chunk(2, dim=-1)
    inputs = NetInputs(mixed, a, b)
    columns = torch.zeros(len(counts), conv_width - 1, channels, dtype=model, device=device)
    states = torch.zeros(len(counts), value_heads, key_dim, value_dim, device=device)
    plan = plan_recurrence(counts, range(len(counts)), device)
    out = prefill(inputs, net, columns, states, plan, inner)
    both = torch.arange(len(counts), device=device)
    decode(inputs, net, columns, states, both, both, out)
    torch.cuda.synchronize(device)
