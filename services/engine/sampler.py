"""Draws the next token of each row as its SamplingParams say."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import sampling
from services.engine.batch import Sampled, SampleSpec
from services.protocol.generate import SamplingParams

log = logging.getLogger(__name__)

_MASK = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments: splitmix64 (Steele et al. 2014) of both.

    It decides the token at absolute `position`, so a request draws alike alone, in a batch and after a resume.
    """
    return (_splitmix64((_splitmix64(seed & _MASK) + position) & _MASK) >> 11) * 2.0**-53


def _splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@dataclass(frozen=True, slots=True)
class SampleRow:
    request_id: str
    spec: SampleSpec
    position: int
    """Absolute, of the token to draw."""


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """One token a row. logits: float32 [len(rows), vocab], on any device; changed in place.

    A row whose logits hold NaN or +inf (broken weights, an overflow) ends with `error`; the others are not concerned.
    """
    for index, row in enumerate(rows):
        _process(logits[index], row.spec)
    highest, tokens = logits.max(-1)
    sound = highest.isfinite().tolist()
    drawn = [index for index, row in enumerate(rows) if row.spec.params.temperature > 0 and sound[index]]
    if drawn:
        tokens[torch.tensor(drawn).to(tokens.device)] = _draw(logits, rows, drawn)
    results = []
    for row, token, finite in zip(rows, tokens.tolist(), sound, strict=True):
        if finite:
            results.append(Sampled((token,)))
        else:
            log.error("request %s: the logits at position %d are not finite", row.request_id, row.position)
            results.append(Sampled((), finish="error"))
    return results


def _draw(logits: Tensor, rows: Sequence[SampleRow], drawn: list[int]) -> Tensor:
    params = [rows[index].spec.params for index in drawn]
    numbers = [uniform(p.seed, rows[index].position) for p, index in zip(params, drawn, strict=True)]
    device = logits.device

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).to(device)

    return sampling.draw(
        logits if len(drawn) == len(rows) else logits[torch.tensor(drawn).to(device)],
        temperature=column([p.temperature for p in params]),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int64).to(device),
        top_p=column([p.top_p for p in params]),
        min_p=column([p.min_p for p in params]),
        uniform=column(numbers),
    )


def _process(logits: Tensor, spec: SampleSpec) -> None:
    """Penalties, then bias, on one row's logits [vocab], in place."""
    params = spec.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor([*spec.prompt, *spec.output], dtype=torch.int64).unique()
        sampling.repetition_penalty(logits, seen.to(logits.device), params.repetition_penalty)
    if spec.output and (params.presence_penalty or params.frequency_penalty):
        tokens, counts = torch.tensor(spec.output, dtype=torch.int64).unique(return_counts=True)
        sampling.count_penalty(
            logits,
            tokens.to(logits.device),
            counts.to(logits.device),
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        )
    if params.logit_bias:
        _bias(logits, params)


def _bias(logits: Tensor, params: SamplingParams) -> None:
    """Ids that the vocabulary does not have are ignored: nothing could be drawn there."""
    known = {token: bias for token, bias in params.logit_bias.items() if 0 <= token < len(logits)}
    tokens = torch.tensor(list(known), dtype=torch.int64)
    logits[tokens.to(logits.device)] += torch.tensor(list(known.values()), dtype=torch.float32).to(logits.device)
