"""Greedy decoding without a cache: what the model says, and how far it says what was expected."""

from collections.abc import Sequence

import torch

from tools.train.data.dataset import Ids
from tools.train.model import TrainModel

ROW_MULTIPLE = 64
"""Of the padded rows: the delta net's chunk."""


def padded(model: TrainModel, rows: Sequence[Ids], extra: int = 0) -> torch.Tensor:
    """int64 [rows, T], zeros on the right (no token sees them), at least `extra` of them in each row."""
    longest = max(len(row) for row in rows) + extra
    ids = torch.zeros(len(rows), -(-longest // ROW_MULTIPLE) * ROW_MULTIPLE, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row.tolist())
    return ids.to(model.device)


@torch.no_grad()
def agreement(
    model: TrainModel, prompts: Sequence[Ids], answers: Sequence[Ids], tokens_at_once: int = 131_072
) -> list[int]:
    """How many leading tokens of each answer greedy decoding gives. One forward pass over prompt + answer: the argmax
    after each right token is what decoding would have chosen there."""
    agreed: list[int] = []
    first = 0
    while first < len(prompts):
        last, longest = first, 0
        while last < len(prompts):
            longest = max(longest, len(prompts[last]) + len(answers[last]))
            if last > first and (last + 1 - first) * (longest + ROW_MULTIPLE) > tokens_at_once:
                break
            last += 1
        pairs = list(zip(prompts[first:last], answers[first:last], strict=True))
        rows = padded(model, [torch.tensor([*p.tolist(), *a.tolist()]).numpy() for p, a in pairs])
        x = model.body(rows).view(*rows.shape, -1)
        for index, (prompt, answer) in enumerate(pairs):
            start = len(prompt)
            chosen = model.logits(model.normed(x[index, start - 1 : start + len(answer) - 1])).argmax(-1)
            right = chosen == rows[index, start : start + len(answer)]
            agreed.append(int(right.long().cumprod(0).sum()))
        first = last
    return agreed


@torch.no_grad()
def greedy(model: TrainModel, prompts: Sequence[Ids], limit: int, stop: int) -> list[list[int]]:
    """Up to `limit` new ids for each prompt, without the stop token. Reads the whole batch again for every token."""
    ids = padded(model, prompts, limit)
    start = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    at = start.clone()
    rows = torch.arange(len(prompts), device=model.device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    for _ in range(limit):
        x = model.body(ids).view(*ids.shape, -1)[rows, at - 1]
        chosen = model.logits(model.normed(x)).argmax(-1)
        done |= chosen == stop
        if bool(done.all()):
            break
        ids[rows[~done], at[~done]] = chosen[~done]
        at = torch.where(done, at, at + 1)
    return [ids[row, start[row] : at[row]].tolist() for row in range(len(prompts))]
