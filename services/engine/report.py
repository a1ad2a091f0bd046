"""Collects what the scheduler has to tell between two results."""

import time
from dataclasses import replace

from services.engine.cache.block_pool import BlockPool
from services.engine.cache.checkpoints import Checkpoints
from services.engine.cache.offload import Offload
from services.engine.cache.tree import Forest
from services.engine.mailbox import StateLoad, StepResult, StepStats, Timeline
from services.engine.sequence import Sequence
from services.protocol.events import EngineLoad
from services.protocol.generate import FinishReason, TokenDelta


class Report:
    """Owned by the scheduler. Everything that is noted is told exactly once, by the next `take`."""

    def __init__(self, pool: BlockPool, checkpoints: Checkpoints, offload: Offload, forest: Forest) -> None:
        self._pool = pool
        self._checkpoints = checkpoints
        self._offload = offload
        self._forest = forest
        self._deltas: list[tuple[str, TokenDelta]] = []
        self._finished: list[Timeline] = []
        self._snapshot = False
        self._sight = False
        self._step = StepStats()
        self._preemptions = 0
        # As of the last result.
        self._totals = StepStats()
        self._load = EngineLoad()
        self._states = StateLoad()

    def tokens(self, sequence: Sequence, tokens: tuple[int, ...]) -> None:
        """A request's output has grown by these."""
        request = sequence.request
        place = len(request.output) - len(tokens)
        cached = sequence.cached_device + sequence.cached_host if place == request.resumed else None
        delta = TokenDelta(request.request_id, place, tokens, cached=cached)
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

    def want_sight(self) -> None:
        self._sight = True

    def take(self, load: EngineLoad, fatal: str) -> StepResult | None:
        """All since the last call; None when there is nothing to tell."""
        stats = self._take_stats()
        checkpoints = self._checkpoints
        states = StateLoad(checkpoints.size, checkpoints.held, checkpoints.on_device)
        stored, removed = self._pool.take_changes()
        counted = stats != StepStats(seconds=stats.seconds)
        changed = counted or load != self._load or states != self._states
        if not (self._deltas or stored or removed or self._snapshot or self._sight or fatal or changed):
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
            states=states,
            sight=self._forest.sight() if self._sight else None,
        )
        self._deltas, self._finished, self._snapshot, self._sight = [], [], False, False
        self._load, self._states = load, states
        return result

    def _take_stats(self) -> StepStats:
        """The last step's counts, with what happened between the steps."""
        before, now = self._totals, self._count()
        stats = replace(
            self._step,
            preemptions=self._preemptions,
            evicted_pages=now.evicted_pages - before.evicted_pages,
            stored_blocks=now.stored_blocks - before.stored_blocks,
            loaded_blocks=now.loaded_blocks - before.loaded_blocks,
            published_checkpoints=now.published_checkpoints - before.published_checkpoints,
            evicted_checkpoints=now.evicted_checkpoints - before.evicted_checkpoints,
            checkpoint_hits=now.checkpoint_hits - before.checkpoint_hits,
            stored_checkpoints=now.stored_checkpoints - before.stored_checkpoints,
            loaded_checkpoints=now.loaded_checkpoints - before.loaded_checkpoints,
        )
        self._step, self._preemptions, self._totals = StepStats(), 0, now
        return stats

    def _count(self) -> StepStats:
        """What pool, checkpoints and offload have counted since the start."""
        return StepStats(
            evicted_pages=self._pool.evictions,
            stored_blocks=self._offload.stored,
            loaded_blocks=self._offload.loaded,
            published_checkpoints=self._checkpoints.published,
            evicted_checkpoints=self._checkpoints.evictions,
            checkpoint_hits=self._checkpoints.hits,
            stored_checkpoints=self._offload.stored_checkpoints,
            loaded_checkpoints=self._offload.loaded_checkpoints,
        )
