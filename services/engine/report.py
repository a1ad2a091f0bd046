"""Collects what the scheduler has to tell between two results."""

import time
from dataclasses import replace

from services.engine.cache.block_pool import BlockPool
from services.engine.cache.offload import Offload
from services.engine.mailbox import StepResult, StepStats, Timeline
from services.engine.sequence import Sequence
from services.protocol.events import EngineLoad
from services.protocol.generate import FinishReason, TokenDelta


class Report:
    """Owned by the scheduler. Everything that is noted is told exactly once, by the next `take`."""

    def __init__(self, pool: BlockPool, offload: Offload) -> None:
        self._pool = pool
        self._offload = offload
        self._deltas: list[tuple[str, TokenDelta]] = []
        self._finished: list[Timeline] = []
        self._snapshot = False
        self._step = StepStats()
        self._preemptions = 0
        # As of the last result.
        self._evictions = 0
        self._stored = 0
        self._loaded = 0
        self._load = EngineLoad()

    def tokens(self, sequence: Sequence, tokens: tuple[int, ...]) -> None:
        """A request's output has grown by these."""
        request = sequence.request
        delta = TokenDelta(request.request_id, len(request.output) - len(tokens), tokens)
        self._deltas.append((request.gateway_id, delta))

    def finished(self, sequence: Sequence, finish: FinishReason, tokens: tuple[int, ...], error: str) -> None:
        """A request has ended; its output has grown by `tokens` before."""
        request = sequence.request
        now = time.time_ns()
        usage = sequence.usage(now)
        delta = TokenDelta(request.request_id, len(request.output) - len(tokens), tokens, finish, usage, error)
        self._deltas.append((request.gateway_id, delta))
        self._finished.append(sequence.timeline(now, finish, usage))

    def preempted(self) -> None:
        self._preemptions += 1

    def stepped(self, prefill_tokens: int, decode_tokens: int, rows: int, seconds: float) -> None:
        self._step = StepStats(prefill_tokens=prefill_tokens, decode_tokens=decode_tokens, rows=rows, seconds=seconds)

    def want_snapshot(self) -> None:
        self._snapshot = True

    def take(self, load: EngineLoad, fatal: str) -> StepResult | None:
        """All since the last call; None when there is nothing to tell."""
        stats = self._take_stats()
        stored, removed = self._pool.take_changes()
        counted = stats != StepStats(seconds=stats.seconds)
        if not (self._deltas or stored or removed or self._snapshot or fatal or counted or load != self._load):
            return None
        result = StepResult(
            deltas=tuple(self._deltas),
            load=load,
            stats=stats,
            finished=tuple(self._finished),
            stored=stored,
            removed=removed,
            snapshot=tuple(block.name for block in self._pool.blocks()) if self._snapshot else None,
            fatal=fatal,
        )
        self._deltas, self._finished, self._snapshot, self._load = [], [], False, load
        return result

    def _take_stats(self) -> StepStats:
        """The last step's counts, with what happened between the steps."""
        evictions, stored, loaded = self._pool.evictions, self._offload.stored, self._offload.loaded
        stats = replace(
            self._step,
            preemptions=self._preemptions,
            evicted_pages=evictions - self._evictions,
            stored_blocks=stored - self._stored,
            loaded_blocks=loaded - self._loaded,
        )
        self._step, self._preemptions = StepStats(), 0
        self._evictions, self._stored, self._loaded = evictions, stored, loaded
        return stats
