"""Plain torch, any device: the oracle."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from kernels.state_plan import StatePlan


def causal_conv(x: Tensor, taps: Tensor, columns: Tensor, plan: StatePlan) -> Tensor:
    taps = taps.float()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    past = len(taps) - 1
    for span in plan.spans:
        tokens = slice(span.first, span.first + span.count)
        window = torch.cat((columns[span.slot], x[tokens].to(columns.dtype)))
        wide = window.float()
        total = wide[past:] * taps[past]
        for tap in range(past):
            total.addcmul_(wide[tap : tap + span.count], taps[tap])
        out[tokens] = silu(total).to(x.dtype)
        columns[span.slot] = window[span.count :]
    if len(plan.singles):
        window = torch.cat((columns[plan.slots], x[plan.singles, None].to(columns.dtype)), dim=1)
        out[plan.singles] = silu((window.float() * taps).sum(1)).to(x.dtype)
        columns[plan.slots] = window[:, 1:]
    return out
