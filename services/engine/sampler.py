"""Draws the next token of each row as its SamplingParams say."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import sampling
from services.engine.adjustments import Adjustments
from services.engine.batch import Sampled, SampleSpec

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


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens on their way to the host."""

    rows: tuple[SampleRow, ...]
    tokens: Tensor
    """int64 [rows], of the host; not written again before another two draws are fetched."""
    arrived: torch.cuda.Event | None


class Sampler:
    """Draws for the rows of one step after the other: `prepare`, `draw`, `fetch`, `results`. The next step may be
    started before the results. Only `draw` works with the logits, without a word to the host, so that it may be
    captured in a CUDA graph and replayed with other rows.

    All calls from one thread, with one current stream.
    """

    def __init__(self, vocab_size: int, rows: int, device: torch.device) -> None:
        """vocab_size: columns of the logits. rows: of a step, at most; on a GPU each takes 57 KiB."""
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        """Of the last draw, by row, in place: -1 where the logits were not finite, 0 in rows that drew nothing."""
        self._table = sampling.DrawTable(rows, device)
        self._workspace = sampling.draw_workspace(rows, device)
        self._adjustments = Adjustments(vocab_size, rows, device)
        self._hosts = [torch.zeros(rows, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in range(2)]

    def prepare(self, rows: Sequence[SampleRow], bucket: int | None = None) -> None:
        """Say how the next `draw` draws: row n of its logits as rows[n] says, nothing in the rows behind them. Enqueues
        one copy to the device, and what requests bring whose penalties or bias are not there yet.

        bucket: rows that the draw will have. Raises ValueError for more rows than that, or than this sampler has.
        """
        if len(rows) > (self._table.capacity if bucket is None else bucket):
            raise ValueError(f"{len(rows)} rows for a step of {bucket} with places for {self._table.capacity}")
        self._table.fill([self._draw_row(row) for row in rows])

    def draw(self, logits: Tensor) -> None:
        """Enqueue the draw of a token of each row of logits into `tokens`. logits: float32 [rows prepared or more,
        vocab], changed in place."""
        sampling.draw_rows(logits, self._table, self._workspace, self.tokens)

    def fetch(self, rows: Sequence[SampleRow]) -> Drawn:
        """Enqueue the way of the last draw's tokens, of the rows that it was prepared with, to the host."""
        self._hosts.reverse()
        host = self._hosts[0][: len(rows)]
        host.copy_(self.tokens[: len(rows)], non_blocking=True)
        arrived = None
        if self.tokens.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        return Drawn(tuple(rows), host, arrived)

    def results(self, rows: Sequence[SampleRow], drawn: Drawn, places: Sequence[int] | None = None) -> list[Sampled]:
        """What `drawn` has for the rows; row n at places[n] there, or at n. Waits for the device.

        A row whose logits hold NaN or +inf (broken weights, an overflow) ends with `error`; the others are not
        concerned.
        """
        if drawn.arrived is not None:
            drawn.arrived.synchronize()
        tokens = drawn.tokens.tolist()
        results = []
        for row, place in zip(rows, range(len(rows)) if places is None else places, strict=True):
            token = tokens[place]
            if token >= 0:
                self._adjustments.drawn(row.request_id, token)
                results.append(Sampled((token,)))
            else:
                log.error("request %s: the logits at position %d are not finite", row.request_id, row.position)
                results.append(Sampled((), finish="error"))
        return results

    def forget(self, request_id: str) -> None:
        """It has ended. Without this it is forgotten when as many others with penalties have run as there are rows."""
        self._adjustments.forget(request_id)

    def _draw_row(self, row: SampleRow) -> sampling.DrawRow:
        params = row.spec.params
        return sampling.DrawRow(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            uniform=uniform(params.seed, row.position),
            adjustment=self._adjustments.of(row.request_id, row.spec),
        )


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """One token a row, by a sampler of their own. logits: float32 [len(rows), vocab], any device; changed in place."""
    sampler = Sampler(logits.shape[1], len(rows), logits.device)
    sampler.prepare(rows)
    sampler.draw(logits)
    return sampler.results(rows, sampler.fetch(rows))
