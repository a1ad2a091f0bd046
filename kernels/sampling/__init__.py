"""Penalties on logits, and the draw of a token from them. V: size of the vocabulary, N: rows."""

import torch
from torch import Tensor

from kernels.sampling import reference

_MAX_ELEMENTS = 2**22
"""Of float64 working copies at once (there are about five): 160 MiB."""


def repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> None:
    """Divide positive and multiply negative logits of the tokens in `seen` (Keskar et al. 2019), in place.

    logits float32 [V]; seen int64 [n], each token once; penalty > 0.
    """
    reference.repetition_penalty(logits, seen, penalty)


def count_penalty(logits: Tensor, tokens: Tensor, counts: Tensor, presence: float, frequency: float) -> None:
    """Subtract presence + frequency * count (OpenAI's definition), in place.

    logits float32 [V]; tokens int64 [n], each token once, with counts int64 [n] >= 1.
    """
    reference.count_penalty(logits, tokens, counts, presence, frequency)


def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """One token a row, int64 [N], computed in float64 so that device and batch do not matter.

    logits: float32 [N, V], each row with a finite maximum. temperature: float64 [N] > 0. top_k: int64 [N], 0 keeps
    all. top_p, min_p: float64 [N]. uniform: float64 [N] in [0, 1).

    With p = softmax(logits / temperature), a token stays when fewer than top_k tokens are more probable (0: always);
    and, of those, when the more probable ones hold less than top_p of the remaining mass; and when p >= min_p * max p.
    The most probable token always stays; ties at a border stay together, so no order of equals matters. The draw is
    the inverse of the remaining distribution's cumulative function, tokens in the order of their ids, at `uniform`.
    """
    step = max(1, _MAX_ELEMENTS // logits.shape[1])
    parts = [
        reference.draw(
            logits[start : start + step],
            temperature[start : start + step],
            top_k[start : start + step],
            top_p[start : start + step],
            min_p[start : start + step],
            uniform[start : start + step],
        )
        for start in range(0, logits.shape[0], step)
    ]
    return torch.cat(parts)
