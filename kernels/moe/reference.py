"""Plain torch, any device: the oracle. Runs each expert once, on the tokens that chose it."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from kernels.linear import linear


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    shares, chosen = logits.softmax(-1, dtype=torch.float32).topk(top_k, dim=-1)
    return chosen, shares / shares.sum(-1, keepdim=True)


def experts(x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    top_k = chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    tokens = order // top_k
    weights = shares.flatten()[order, None]
    counts = torch.bincount(chosen.flatten(), minlength=len(gate_up)).tolist()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    first = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        part = slice(first, first + count)
        gate, up = linear(x[tokens[part]], gate_up[expert]).chunk(2, dim=-1)
        out.index_add_(0, tokens[part], linear(silu(gate) * up, down[expert]).float() * weights[part])
        first += count
    return out.to(x.dtype)
