"""Plain torch, any device: the oracle."""

import torch
from torch import Tensor

from kernels.sampling.table import MOST_COUNTED, PROMPT_MARK, Adjustment

_HEAD = 1024
"""Most probable tokens looked at first for top_p; the whole vocabulary is sorted only where they do not reach it."""


def repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> None:
    """Divide positive and multiply negative logits of the tokens in `seen` (Keskar et al. 2019), in place.

    logits float32 [V]; seen int64 [n], each token once; penalty > 0.
    """
    picked = logits[seen]
    logits[seen] = torch.where(picked > 0, picked / penalty, picked * penalty)


def count_penalty(logits: Tensor, tokens: Tensor, counts: Tensor, presence: float, frequency: float) -> None:
    """Subtract presence + frequency * count (OpenAI's definition), in place.

    logits float32 [V]; tokens int64 [n], each token once, with counts [n] >= 1.
    """
    logits[tokens] -= presence + frequency * counts.to(logits.dtype)


def adjust(logits: Tensor, made: Adjustment) -> None:
    """Penalties, then bias, on one row's logits [V], in place."""
    if made.cells is not None:
        seen = made.cells.nonzero()[:, 0]
        repetition_penalty(logits, seen, made.repetition)
        counts = made.cells[seen] & MOST_COUNTED
        drawn = counts > 0
        count_penalty(logits, seen[drawn], counts[drawn], made.presence, made.frequency)
    if made.bias_ids is not None and made.bias is not None:
        logits[made.bias_ids] += made.bias


def count(made: Adjustment, token: int) -> None:
    """Count a token that was drawn."""
    if made.cells is not None and int(made.cells[token]) & MOST_COUNTED < MOST_COUNTED:
        made.cells[token] += 1


def cells_of(prompt: Tensor, output: Tensor, vocabulary: int) -> Tensor:
    """int16 [V] of the tokens int64 [n] of a prompt and its answer so far."""
    cells = output.bincount(minlength=vocabulary).clamp(max=MOST_COUNTED).to(torch.int16)
    cells[prompt] |= PROMPT_MARK
    return cells


def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    below = logits.double() - logits.max(-1, keepdim=True).values
    # The maximum goes first: a tiny temperature then overflows to -inf, whose weight is 0, and never to inf - inf.
    weights = (below / temperature[:, None]).exp()
    weights = _top_k(weights, top_k)
    weights = _top_p(weights, top_p)
    weights = weights * (weights >= min_p[:, None].clamp(max=1) * weights.max(-1, keepdim=True).values)
    cumulative = weights.cumsum(-1)
    # Below the total even for the largest double below 1, whose product is half a unit of the last place away from it.
    target = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def _top_k(weights: Tensor, top_k: Tensor) -> Tensor:
    vocabulary = weights.shape[1]
    k = torch.where((top_k <= 0) | (top_k > vocabulary), vocabulary, top_k)
    limited = k < vocabulary
    if not bool(limited.any()):
        return weights
    highest = weights.topk(int(k[limited].max()), sorted=True).values
    border = highest.gather(1, (k.clamp(max=highest.shape[1]) - 1)[:, None])
    return weights * ((weights >= border) | ~limited[:, None])


def _top_p(weights: Tensor, top_p: Tensor) -> Tensor:
    limited = top_p < 1
    if not bool(limited.any()):
        return weights
    mass = top_p * weights.sum(-1)
    highest = weights.topk(min(_HEAD, weights.shape[1]), sorted=True).values
    border = _nucleus_border(highest, mass)
    short = limited & (highest.sum(-1) < mass)
    if bool(short.any()):
        border[short] = _nucleus_border(weights[short].sort(-1, descending=True).values, mass[short])
    return weights * ((weights >= border[:, None]) | ~limited[:, None])


def _nucleus_border(descending: Tensor, mass: Tensor) -> Tensor:
    """The least weight of each row before which the weights add up to less than `mass`; at least the first."""
    before = descending.cumsum(-1).roll(1, -1)
    before[:, 0] = 0
    last = (before < mass[:, None]).sum(-1).clamp(min=1) - 1
    return descending.gather(1, last[:, None])[:, 0]
