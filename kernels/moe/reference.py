"""Plain torch, any device: the oracle. Runs each expert once, on the tokens that chose it."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from kernels.embedding.reference import decoded_rows
from kernels.linear import linear
from kernels.linear.grouped.weight import GroupedWeight
from kernels.linear.weight import Weight


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    shares, chosen = logits.softmax(-1, dtype=torch.float32).topk(top_k, dim=-1)
    return chosen, shares / shares.sum(-1, keepdim=True)


def experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    gate_up: Tensor | Weight | GroupedWeight,
    down: Tensor | Weight | GroupedWeight,
) -> Tensor:
    top_k = chosen.shape[1]
    count = len(down) if isinstance(down, Tensor) else down.rows // x.shape[1]
    order = chosen.flatten().argsort(stable=True)
    tokens = order // top_k
    weights = shares.flatten()[order, None]
    counts = torch.bincount(chosen.flatten(), minlength=count).tolist()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    first = 0
    for expert, share in enumerate(counts):
        if not share:
            continue
        part = slice(first, first + share)
        gate, up = linear(x[tokens[part]], _of_expert(gate_up, expert, count, x.dtype)).chunk(2, dim=-1)
        moved = linear(silu(gate) * up, _of_expert(down, expert, count, x.dtype), dtype=torch.float32)
        out.index_add_(0, tokens[part], moved * weights[part])
        first += share
    return out


def _of_expert(matrix: Tensor | Weight | GroupedWeight, expert: int, count: int, dtype: torch.dtype) -> Tensor:
    if isinstance(matrix, Tensor):
        return matrix[expert]
    rows = matrix.rows // count
    return decoded_rows(torch.arange(expert * rows, (expert + 1) * rows, device=matrix.device), matrix).to(dtype)
