"""How many drafts of the MTP layer the main model would accept."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tools.train.model import TrainModel

STEPS = 3


@torch.no_grad()
def chained_acceptance(model: TrainModel, ids: Tensor, counted: Tensor, steps: int = STEPS) -> list[float]:
    """Given any text: the share of counted positions where drafts 1..s all equal the main model's greedy choice, for
    each s. As in training: draft s reads the keys of draft s at all earlier positions. ids int64, counted bool
    [rows, T]: whether the token that the last draft stands for counts."""
    hidden = model.normed(model.body(ids))
    main = model.logits(hidden).argmax(-1).view(ids.shape)
    agreed = torch.ones_like(counted)
    inside = torch.arange(ids.shape[1], device=ids.device) < ids.shape[1] - steps - 1
    shares: list[float] = []
    for step in range(1, steps + 1):
        hidden = model.draft_normed(model.mtp(hidden, torch.roll(ids, -step, 1)))
        draft = model.logits(hidden).argmax(-1).view(ids.shape)
        agreed &= draft == torch.roll(main, -step, 1)
        places = torch.roll(counted, -step - 1, 1) & inside
        shares.append(share(agreed, places))
    return shares


@torch.no_grad()
def engine_acceptance(
    model: TrainModel, rows: Sequence[tuple[Sequence[int], Sequence[int]]], steps: int = STEPS
) -> list[float]:
    """On the model's own greedy output, with what an engine has: draft s is fed draft s - 1, reads the first drafts'
    keys of the past and the own keys of the drafts after them. rows: (prompt ids, output ids); counted are the
    positions whose `steps` drafts all stand for output tokens."""
    agreed_sum = [0] * steps
    count = 0
    for prompt, output in rows:
        agreed = row_acceptance(model, torch.tensor([*prompt, *output], device=model.device), steps)
        # at t the token t + 1 is known, draft s stands for t + 1 + s
        first, last = len(prompt) - 1, len(prompt) + len(output) - 1 - steps
        if last > first:
            count += last - first
            for step in range(steps):
                agreed_sum[step] += int(agreed[step, first:last].sum())
    return [each / max(1, count) for each in agreed_sum]


def row_acceptance(model: TrainModel, ids: Tensor, steps: int) -> Tensor:
    """bool [steps, T]: at position t of ids [T], do drafts 1..s all equal the main model's greedy choice?"""
    shape, n = model.shape, len(ids)
    padded = torch.nn.functional.pad(ids, (0, -n % 64))
    hidden = model.normed(model.body(padded[None]))[:n]
    main = model.logits(hidden).argmax(-1)
    tokens = torch.roll(ids, -1)
    groups = shape.heads // shape.kv_heads
    visible = torch.ones(n, n, dtype=torch.bool, device=ids.device).tril()
    first_keys = first_values = hidden
    own: list[tuple[Tensor, Tensor]] = []
    agreed = torch.ones(n, dtype=torch.bool, device=ids.device)
    result: list[Tensor] = []
    for step in range(1, steps + 1):
        x = model.mtp_input(hidden, tokens)
        q, k, v, gate = model.mtp_attention_inputs(x, model.places(n, n, first=step - 1))
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        if step == 1:
            first_keys, first_values = k, v
        else:
            own.append((k, v))
        scores = torch.einsum("thd,shd->hts", q.float(), first_keys.float()).masked_fill(~visible, float("-inf"))
        columns = [torch.einsum("thd,thd->ht", q.float(), key.float())[..., None] for key, _ in own]
        shares = torch.cat([scores, *columns], -1).div(shape.head_dim**0.5).softmax(-1)
        o = torch.einsum("hts,shd->thd", shares[..., :n], first_values.float())
        for index, (_, value) in enumerate(own):
            o = o + shares[..., n + index].T[..., None] * value.float()
        hidden = model.draft_normed(model.mtp_attention_output(x, o.to(x.dtype).reshape(n, -1), gate))
        tokens = model.logits(hidden).argmax(-1)
        agreed = agreed & (tokens == torch.roll(main, -step))
        result.append(agreed)
    return torch.stack(result)


def share(agreed: Tensor, places: Tensor) -> float:
    return (agreed & places).sum().item() / max(1, int(places.sum()))
