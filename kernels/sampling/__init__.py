"""Penalties on logits, and the draw of a token from them. V: size of the vocabulary, N: rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.sampling import reference
from kernels.sampling.table import Adjustment, DrawRow, DrawTable

__all__ = [
    "Adjustment",
    "DrawRow",
    "DrawTable",
    "cells_of",
    "draw",
    "draw_rows",
    "draw_workspace",
]

_MAX_ELEMENTS = 2**22
"""Of float64 working copies at once (there are about five): 160 MiB."""


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


def cells_of(prompt: Sequence[int], output: Sequence[int], vocabulary: int, device: torch.device) -> Tensor:
    """`Adjustment.cells`, int16 [vocabulary], of a request's prompt and of its answer so far."""
    prompt_ids, output_ids = (torch.tensor(ids, dtype=torch.int64).to(device) for ids in (prompt, output))
    return reference.cells_of(prompt_ids, output_ids, vocabulary)


def draw_workspace(rows: int, device: torch.device) -> Tensor:
    """For `draw_rows` of up to so many rows, one call at a time. Nothing on a CPU."""
    if device.type != "cuda":
        return torch.empty(0, device=device)
    from kernels.sampling import device as kernels  # triton exists on Linux only

    return kernels.draw_workspace(rows, device)


def draw_rows(logits: Tensor, table: DrawTable, workspace: Tensor, tokens: Tensor) -> None:
    """Adjust the logits as the first rows of the table say, in place; draw a token of each (`draw`), or take the most
    probable one, into `tokens`; and count it in the row's cells.

    logits: float32 [N, V], rows at any stride. workspace: see `draw_workspace`. tokens: int64 [N or more]; those of
    idle rows are 0. A row that holds NaN or +inf, or nothing but -inf, gives -1, and nothing is counted.

    On a GPU all is enqueued and nothing waited for, so it can be captured in a graph; `device` says where its draws
    differ from a CPU's. Raises ValueError for what does not fit together.
    """
    if logits.is_cuda:
        from kernels.sampling import device

        device.draw_rows(logits, table, workspace, tokens)
        return
    rows = table.rows[: len(logits)]
    for x, row in zip(logits, rows, strict=False):
        if row.adjustment is not None:
            reference.adjust(x, row.adjustment)
    highest, best = logits.max(-1)
    tokens[: len(logits)] = 0
    tokens[: len(rows)] = best[: len(rows)].where(highest[: len(rows)].isfinite(), -1)
    drawn = [index for index, row in enumerate(rows) if row.temperature > 0 and int(tokens[index]) >= 0]
    if drawn:
        chosen = [rows[index] for index in drawn]
        columns = [[r.temperature, r.top_p, r.min_p, r.uniform] for r in chosen]
        temperature, top_p, min_p, uniform = torch.tensor(columns, dtype=torch.float64).T.contiguous()
        top_k = torch.tensor([row.top_k for row in chosen], dtype=torch.int64)
        mine = logits if len(drawn) == len(logits) else logits[drawn]
        tokens[drawn] = draw(mine, temperature, top_k, top_p, min_p, uniform)
    for token, row in zip(tokens.tolist(), rows, strict=False):
        if row.adjustment is not None and token >= 0:
            reference.count(row.adjustment, token)
