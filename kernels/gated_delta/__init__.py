"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks"), over many sequences with a state each.

T: tokens of a step. K, V: dims of a key and of a value head. Value head h reads key head h * key_heads // value_heads.
With q and k l2-normalised (x / sqrt(sum x^2 + 1e-6)), for each value head and token, in float32:

    S <- exp(g) S;  u = beta (v - k S);  S <- S + k^T u;  o = q S / sqrt(K)
"""

import torch
from torch import Tensor

from kernels.gated_delta import flash, reference
from kernels.state_plan import StatePlan, plan_recurrence


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


def prepare(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Have kernels for such tensors compiled and tuned now and not in the first request: flash-linear-attention takes a
    minute for a new shape (63 s for the 27B's on an H200). Where it is not used there is nothing to do."""
    counts = (65, 130)
    q, k = (torch.zeros(sum(counts), key_heads, key_dim, dtype=dtype, device=device) for _ in range(2))
    if not flash.usable(q):
        return
    v = torch.zeros(sum(counts), value_heads, value_dim, dtype=dtype, device=device)
    g, beta = torch.zeros(2, sum(counts), value_heads, device=device)
    states = torch.zeros(len(counts), value_heads, key_dim, value_dim, device=device)
    gated_delta(q, k, v, g, beta, states, plan_recurrence(counts, range(len(counts)), device))
    torch.cuda.synchronize(device)
