"""The two values that cross between scheduler and runner: ScheduledBatch goes down, ModelOutput comes up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from services.engine.cache.arena import Arena
from services.protocol.generate import FinishReason, SamplingParams
from services.protocol.kv import Extent


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to draw the token behind a row's last one, at absolute position `start + len(tokens)` of the sequence."""

    params: SamplingParams
    prompt: Sequence[int]
    """For the repetition penalty. The scheduler's own lists: read, never kept beyond the step."""
    output: Sequence[int]
    """All tokens generated so far, those before a resume or preemption included."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step: run `tokens` at positions [start, start + len(tokens)).

    With a recurrent model `tokens` may be empty where `sample` is set: then the draw is made from the last hidden
    vector that the state slot keeps (an exact repeat of a checkpointed prefix computes nothing).
    """

    request_id: str
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    """Page table covering positions [0, start + len(tokens)); position p lies in pages[p // 64] at p % 64."""
    write_from: int
    """KV of positions below this is in the pages already, which may be shared: it is read and not written again.
    (An exact repeat of a cached prompt recomputes its last token only for the logits.)"""
    sample: SampleSpec | None
    """None in the middle of a prefill."""
    state: int = -1
    """Slot of the sequence's recurrent state (-1: the model has none). Before the step it holds the state behind
    position `start` (at start 0 the runner zeroes it), after it that behind the row's end, with the hidden vector of
    the last token. No two rows of a batch share one."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy one device page, or one state slot, onto another."""

    kind: Literal["page", "state"]
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copy one block between a device page and the kvstore's arena.

    `store` reads a page whose tokens earlier steps computed; `load` fills a page that no row of this batch reads.
    Both sides stay reserved by the scheduler until `id` comes back in ModelOutput.transfers_done.

    A checkpoint is one object: the bytes of state slot `state`, behind them those of its partial tail page `page`
    where it has one.
    """

    id: int
    kind: Literal["load", "store"]
    page: int
    """-1: none (a checkpoint at a block's border)."""
    arena: Arena
    extents: tuple[Extent, ...]
    state: int = -1
    """-1: none (a plain block)."""


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    step: int
    rows: tuple[Row, ...]
    transfers: tuple[Transfer, ...] = ()
    before: tuple[Copy, ...] = ()
    """Done in this order before the rows run: a checkpoint's state into a request's slot, its tail page into a page of
    the request's own (copy on write)."""
    after: tuple[Copy, ...] = ()
    """Done in this order when the rows have run: checkpoints taken at the rows' ends."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a row with a SampleSpec produced: usually one token; none (not due yet: the scripted runner) or several
    (speculation; a scripted piece) are as valid."""

    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    """Set only by a runner that ends an answer itself (scripted `length`); else the scheduler decides."""
    due: float = 0.0
    """time.monotonic() before which running this request again gives nothing (scripted delays): it is left out of the
    batches until then. 0: at once."""


@dataclass(frozen=True, slots=True)
class ModelOutput:
    step: int
    sampled: Mapping[str, Sampled]
    """By request id; exactly the rows that had a SampleSpec."""
    transfers_done: tuple[int, ...] = ()
    """Ids of transfers of this or earlier steps whose bytes have arrived."""
    transfers_failed: tuple[int, ...] = ()
    """Ids of transfers that could not be done: a load is a miss, a store is forgotten."""
    transfers_pending: int = 0
    """Still under way: the loop comes back soon even if no request can run."""
    wake_at: float | None = None
    """time.monotonic() seconds. Set when no row made progress and none will before then (scripted delays)."""
    aux: Mapping[str, float] = field(default_factory=dict)
    """Measurements for metrics, by name."""


class Runner(Protocol):
    """Executes batches on one thread, in order. Raises only when the device itself is unusable."""

    def run(self, batch: ScheduledBatch) -> ModelOutput: ...

    def close(self) -> None: ...
