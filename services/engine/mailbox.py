"""What goes into the core's thread and what comes out of it.

The inbox is one `queue.SimpleQueue[Message]`: requests from the server and replies of the kvstore wait in the same
place, so that the step loop has one thing to wait on. The outbox is one callable that takes a StepResult; it is called
on the core's thread and must only hand the value over.
"""

from dataclasses import dataclass

from services.engine.cache.arena import Arena
from services.engine.request import Request
from services.protocol.events import CachedRun, EngineLoad
from services.protocol.generate import FinishReason, Standing, TokenDelta, Usage
from services.protocol.kv import Extent


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class CancelRequest:
    request_id: str


@dataclass(frozen=True, slots=True)
class KvLeased:
    """Reply to KvClient.lease(tag, ...): extents of the longest hit prefix; none at all when the store is away. And to
    KvClient.find(tag, ...)."""

    tag: int
    arena: Arena | None
    lease: int
    extents: tuple[tuple[Extent, ...], ...]
    from_disk: tuple[int, ...] = ()
    """Indices of the objects that the store had on disk only."""
    goal: int = -1
    """Of a find: the index of the goal that can be had; -1: none."""


@dataclass(frozen=True, slots=True)
class KvReserved:
    """Reply to KvClient.reserve(tag, ...): one item an entry; None: nothing to write. All None when it is away."""

    tag: int
    arena: Arena | None
    extents: tuple[tuple[Extent, ...] | None, ...]
    full: int = 0
    """Entries for which there was no room."""


@dataclass(frozen=True, slots=True)
class KvConnected:
    """The store is there (again). Nothing that an earlier arena held is known to it."""

    arena: Arena


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Ask for all block names on the device; the answer is StepResult.snapshot of the next result."""


@dataclass(frozen=True, slots=True)
class NoteSession:
    """What is to be expected of a session now (`services.protocol.events.SessionNote`)."""

    session_id: str
    standing: Standing


@dataclass(frozen=True, slots=True)
class Inspect:
    """Ask what is cached; the answer is StepResult.sight of the next result."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop. The server has drained before."""


KvAnswer = KvLeased | KvReserved | KvConnected
"""All that a KvClient delivers."""

Message = Submit | CancelRequest | KvAnswer | NoteSession | Snapshot | Inspect | Stop


@dataclass(frozen=True, slots=True)
class Timeline:
    """When one finished request did what, in time.time_ns(), for its spans and histograms; 0 = never got there."""

    request_id: str
    arrived: int
    restore_started: int
    restore_ended: int
    scheduled: int
    first_token: int
    finished: int
    finish: FinishReason
    usage: Usage


@dataclass(frozen=True, slots=True)
class StepStats:
    """Counts of one step, for metrics."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    rows: int = 0
    preemptions: int = 0
    evicted_pages: int = 0
    stored_blocks: int = 0
    """Written through to the kvstore."""
    loaded_blocks: int = 0
    """Restored from the kvstore."""
    published_checkpoints: int = 0
    """That came to the device, computed or restored."""
    evicted_checkpoints: int = 0
    """Given up for other states."""
    checkpoint_hits: int = 0
    """Requests that went on from one."""
    stored_checkpoints: int = 0
    loaded_checkpoints: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StateLoad:
    """Who has the slots for recurrent states."""

    total: int = 0
    """0: the model has no such state."""
    held: int = 0
    """By requests and copies."""
    checkpoints: int = 0


@dataclass(frozen=True, slots=True)
class Sight:
    """What is cached, as of one moment."""

    runs: tuple[CachedRun, ...]
    page_bytes: int
    """Of one block."""
    state_bytes: int
    """Of one checkpoint; 0: the model has no recurrent state."""


@dataclass(frozen=True, slots=True)
class StepResult:
    deltas: tuple[tuple[str, TokenDelta], ...]
    """(gateway_id, delta) of each request that has something to say."""
    load: EngineLoad
    stats: StepStats
    finished: tuple[Timeline, ...] = ()
    stored: tuple[bytes, ...] = ()
    """Block names that entered the device cache."""
    removed: tuple[bytes, ...] = ()
    snapshot: tuple[bytes, ...] | None = None
    fatal: str = ""
    """Not empty: the loop has ended on this error (the device is gone); every request got a final `error` delta."""
    states: StateLoad = StateLoad()
    sight: Sight | None = None
    """The answer to Inspect."""
