"""Plain torch, any device: the oracle."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from kernels.state_plan import StatePlan


def causal_conv(x: Tensor, taps: Tensor, columns: Tensor, plan: StatePlan, dtype: torch.dtype) -> Tensor:
    taps = taps.float()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    past = len(taps) - 1
    for span in plan.spans:
        tokens = slice(span.first, span.first + span.count)
        wide = torch.cat((columns[span.slot].float(), x[tokens].float()))
        total = wide[past:] * taps[past]
        for tap in range(past):
            total.addcmul_(wide[tap : tap + span.count], taps[tap])
        out[tokens] = _rounded(silu(total), dtype)
        columns[span.slot] = wide[span.count :].to(columns.dtype)
    if len(plan.singles):
        wide = torch.cat((columns[plan.slots].float(), x[plan.singles, None].float()), dim=1)
        out[plan.singles] = convolved(wide, taps, dtype)
        columns[plan.slots] = wide[:, 1:].to(columns.dtype)
    return out


def convolved(windows: Tensor, taps: Tensor, dtype: torch.dtype) -> Tensor:
    """windows [B, W, channels]: each row with those before it, as wide as taps. Returns [B, channels] of `dtype`."""
    return _rounded(silu((windows * taps).sum(1)), dtype)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float16:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)
