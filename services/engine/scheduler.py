"""Decides what runs in each step. Owns every request, every page and every block name; knows no tensors."""

import bisect
import logging
import time

from services.engine.batch import ModelOutput, Row, Sampled, SampleSpec, ScheduledBatch
from services.engine.cache.block_pool import BlockPool
from services.engine.cache.checkpoints import Checkpoints, Mark
from services.engine.cache.kv_client import KvClient, NoKvStore
from services.engine.cache.offload import Offload
from services.engine.cache.owners import Owner, Owners
from services.engine.cache.prefix_cache import PrefixCache
from services.engine.cache.recompute_cost import RecomputeCost
from services.engine.cache.restore import Restored
from services.engine.cache.tree import Forest
from services.engine.checkpoint_resume import CheckpointResume
from services.engine.mailbox import KvAnswer, StepResult
from services.engine.planner import PLENTY, Planner, pages_of
from services.engine.report import Report
from services.engine.request import Request, State
from services.engine.resume import BlockResume, Resume
from services.engine.scheduler_config import SchedulerConfig
from services.engine.sequence import Sequence
from services.engine.step_plan import StepPlan
from services.protocol.events import EngineLoad
from services.protocol.generate import FinishReason, Standing
from services.protocol.hashing import BLOCK_TOKENS

__all__ = ["Scheduler", "SchedulerConfig"]

log = logging.getLogger(__name__)

PREFETCHES = 4
"""Requests in the queue, at its front, that are looked up in the kvstore before their turn."""


class Scheduler:
    """Continuous batching over a paged KV cache. Every method runs on the core's thread.

    WAITING -> (WAITING_FOR_KV ->) RUNNING -> FINISHED; preemption leads from RUNNING back to the front of the queue.

    * Arrival order rules: the queue is left at its front only, pages are taken from younger requests only, and a
      request that finds no page and nobody younger keeps what it has and waits. So the oldest always gets on.
    * A request is admitted when the pages for all its tokens so far are there, beside those that the admitted ones
      still need for theirs; they are taken as steps need them. A recurrent model's requests need a slot besides.
    * Each wait ends by something sure to come: a message of the KvClient, a transfer, or a step of another request.
    """

    def __init__(self, config: SchedulerConfig, kv: KvClient | None = None) -> None:
        self._config = config
        self._pool = BlockPool(config.pages, recurrent=config.state_slots > 0)
        self._owners = Owners()
        self._cache = PrefixCache(self._pool)
        self._cost = RecomputeCost()
        self._checkpoints = Checkpoints(self._pool, config.state_slots)
        self._offload = Offload(
            self._pool,
            self._cache,
            self._checkpoints,
            kv or NoKvStore(),
            self._cost,
            config.page_bytes,
            config.state_bytes,
        )
        self._resume: Resume = BlockResume(self._pool, self._cache)
        if config.state_slots:
            self._resume = CheckpointResume(config, self._pool, self._cache, self._checkpoints, self._offload)
        self._planner = Planner(config, self._pool, self._offload, self._resume)
        forest = Forest(self._pool, self._checkpoints, self._owners, config.page_bytes, config.state_bytes)
        self._report = Report(self._pool, self._checkpoints, self._offload, forest)
        self._max_model_len = min(config.max_model_len, config.pages * BLOCK_TOKENS)

        self._active: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # by order, as the other two
        self._restoring: list[Sequence] = []
        self._running: list[Sequence] = []
        self._arrivals = 0
        self._step = 0
        self._turns = 0
        self._batch: list[tuple[Sequence, Row]] = []

    # What comes in.

    def submit(self, request: Request) -> None:
        """Take a request. One that cannot run gets its final delta with the next result."""
        if request.request_id in self._active:
            log.warning("request %s is here already: the second one is ignored", request.request_id)
            return
        owner = self._owners.of(request.session_id or request.request_id)
        sequence = Sequence.of(request, self._arrivals, self._config.fingerprint, self._max_model_len, owner)
        if owner.begins():
            self._weigh(owner)
        self._arrivals += 1
        self._active[request.request_id] = sequence
        request.state = State.WAITING
        self._waiting.append(sequence)
        if not request.prompt:
            self._finish(sequence, "error", error="the prompt is empty")
        elif (finish := sequence.finished()) is not None:
            self._finish(sequence, finish)

    def cancel(self, request_id: str) -> None:
        """End a request in whatever state. Unknown ids are ignored."""
        if (sequence := self._active.get(request_id)) is not None:
            self._finish(sequence, "cancel")

    def receive(self, message: KvAnswer) -> None:
        """What the KvClient had to say."""
        self._offload.receive(message)

    def note(self, session_id: str, standing: Standing) -> None:
        """What is to be expected of a session now. Unknown ones are ignored."""
        owner = self._owners.known(session_id)
        if owner is not None and owner.becomes(standing):
            self._weigh(owner)

    def _weigh(self, owner: Owner) -> None:
        self._pool.weigh(owner)
        self._offload.weigh(owner)

    def inspect(self) -> None:
        """Let the next result carry the tree of what is cached."""
        self._report.want_sight()

    def snapshot(self) -> None:
        """Let the next result carry all block names on the device."""
        self._report.want_snapshot()

    def fail(self, error: str) -> None:
        """The device is gone: every request ends with this error."""
        self._batch = []
        self._resume.device_lost()
        for sequence in list(self._active.values()):
            self._finish(sequence, "error", error=error)

    # A step.

    def schedule(self) -> ScheduledBatch | None:
        """What to run now; None when there is nothing to run and no transfer to start or to wait for."""
        if self._batch:
            raise RuntimeError("the previous batch has no output yet")
        decoding = bool(self._running) and all(sequence.prefilled for sequence in self._running)
        # First, since a restore may end by having nothing left to load.
        transfers = self._offload.transfers(decoding)
        self._take_restored()
        self._admit()
        self._prefetch()
        plan = self._planner.plan(self._running)
        self._requeue(plan)
        if not plan.counts and not transfers and not self.transfers_under_way:
            return None
        self._step += 1
        self._batch = [(sequence, self._row(sequence, count)) for sequence, count in plan.counts.items()]
        before, after = self._resume.copies(self._batch)
        return ScheduledBatch(self._step, tuple(row for _, row in self._batch), transfers, before, after)

    @property
    def next_due(self) -> float | None:
        """time.monotonic() when the first of those that the last schedule left out for a time may run."""
        return self._planner.due

    @property
    def transfers_under_way(self) -> int:
        return self._offload.under_way

    def _take_restored(self) -> None:
        for restored in self._offload.take_restored():
            sequence = self._active[restored.request_id]
            sequence.restore_ends(time.time_ns())
            sequence.short = restored.again
            if sequence.prefetch:
                self._take_prefetched(sequence, restored)
                continue
            self._restoring.remove(sequence)
            if restored.again:
                self._resume.let_go(sequence)
                self._pool.release(restored.pages)
                self._enqueue(sequence)
            elif self._resume.begin(sequence, restored.pages, restored.host, restored.checkpoint, restored.disk):
                self._start(sequence)
            else:
                self._enqueue(sequence)

    def _admit(self) -> None:
        """Move requests from the queue's front to the running or restoring ones."""
        while self._waiting and len(self._running) + len(self._restoring) < self._config.max_running:
            sequence = self._waiting[0]
            if sequence.prefetch:
                return
            chain = sequence.chain
            pages = self._cache.match(chain)
            if len(pages) < chain.full and self._offload.being_restored(chain.block(len(pages))):
                return
            if not self._resume.room(len(self._restoring)):
                return
            # Cached pages leave the available ones when they are acquired, so they count as wanted.
            shared = sum(map(self._pool.held, pages))
            if pages_of(len(sequence.tokens) + 1) - shared > self._pool.available - self._promised():
                return
            marks = self._resume.sought(sequence, len(pages)) if self._offload.connected else None
            self._pool.acquire(pages)
            if marks is not None:
                self._restore(sequence, pages, marks)
            elif self._resume.begin(sequence, pages, 0, None):
                self._start(sequence)
            else:
                return
            del self._waiting[0]

    def _prefetch(self) -> None:
        """Bring to the device what the first of those in the queue will go on from, as far as there is room for it
        beside all that the others will take. It is held by nobody afterwards, but was used last."""
        if not self._waiting or not self._offload.connected:
            return
        room = self._pool.safe - self._promised() - PLENTY * len(self._running)
        for sequence in self._waiting[:PREFETCHES]:
            room -= pages_of(len(sequence.tokens) + 1)
            slots = len(self._restoring) + sum(other.prefetch for other in self._waiting)
            if room < 0 or not self._resume.room(slots):
                return
            if sequence.prefetch or sequence.prefetched is not None:
                continue
            chain = sequence.chain
            pages = self._cache.match(chain)
            if len(pages) < chain.full and self._offload.being_restored(chain.block(len(pages))):
                continue
            marks = self._resume.sought(sequence, len(pages))
            if marks is None:
                sequence.prefetched = range(0)
                continue
            self._pool.acquire(pages)
            sequence.prefetch = True
            self._ask(sequence, pages, marks)

    def _take_prefetched(self, sequence: Sequence, restored: Restored) -> None:
        blocks, checkpoint = len(restored.pages), restored.checkpoint
        end = blocks * BLOCK_TOKENS if checkpoint is None else checkpoint.mark.position
        sequence.prefetch = False
        sequence.prefetched = range((blocks - restored.host) * BLOCK_TOKENS, end)
        self._resume.let_go(sequence)
        self._pool.release(restored.pages, sequence.owner)
        if checkpoint is not None:
            self._checkpoints.unpin(checkpoint)

    def _restore(self, sequence: Sequence, pages: list[int], marks: list[Mark]) -> None:
        sequence.request.state = State.WAITING_FOR_KV
        bisect.insort(self._restoring, sequence, key=_order)
        self._ask(sequence, pages, marks)

    def _ask(self, sequence: Sequence, pages: list[int], marks: list[Mark]) -> None:
        request = sequence.request
        sequence.restore_begins(time.time_ns())
        self._offload.restore(request.request_id, sequence.chain, pages, sequence.owner, request.trace, marks)

    def _promised(self) -> int:
        """Pages that the admitted requests will take for tokens which they have already."""
        pages = sum(max(0, pages_of(len(sequence.tokens) + 1) - len(sequence.pages)) for sequence in self._running)
        for sequence in [*self._restoring, *(waiting for waiting in self._waiting if waiting.prefetch)]:
            held = self._offload.held(sequence.request.request_id)
            pages += max(0, pages_of(len(sequence.tokens) + 1) - held)
        return pages

    def _start(self, sequence: Sequence) -> None:
        sequence.request.state = State.RUNNING
        bisect.insort(self._running, sequence, key=_order)

    def _requeue(self, plan: StepPlan) -> None:
        """Those that had to give up their pages go back to where they were in the queue."""
        for sequence in plan.preempted:
            self._report.preempted()
            self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.request.state = State.WAITING
        bisect.insort(self._waiting, sequence, key=_order)

    def _row(self, sequence: Sequence, count: int) -> Row:
        request = sequence.request
        start = min(sequence.computed, len(sequence.tokens) - sequence.rerun)
        end = start + count
        sample = None
        if end == len(sequence.tokens):
            sample = SampleSpec(request.sampling, request.prompt, request.output)
        self._turns += 1
        sequence.turn = self._turns
        sequence.scheduled = sequence.scheduled or time.time_ns()
        return Row(
            request_id=request.request_id,
            tokens=sequence.tokens[start:end],
            start=start,
            pages=sequence.pages,
            write_from=sequence.computed,
            sample=sample,
            state=sequence.state,
        )

    # What the step gave.

    def update(self, output: ModelOutput, seconds: float) -> None:
        """Take in the output of the last batch, which ran for `seconds`."""
        prefills: list[tuple[int, int]] = []
        decoded = 0
        batch, self._batch = self._batch, []
        failed = {
            sequence
            for sequence, row in batch
            if row.sample is not None and output.sampled[row.request_id].finish == "error"
        }
        for sequence, row in batch:
            count = len(row.tokens)
            if sequence.prefilled:
                decoded += count
            else:
                prefills.append((row.start, count))
            sequence.ran(row.start, count)
            if sequence not in failed:
                self._commit(sequence)
        self._resume.stepped(failed)
        for sequence, row in batch:
            if row.sample is not None:
                self._take_sampled(sequence, output.sampled[row.request_id])
        prefilled = sum(count for _, count in prefills)
        if prefilled > decoded:
            self._cost.observe(prefills, seconds)
        self._offload.complete(output)
        self._report.stepped(prefilled, decoded, len(batch), seconds)

    def _commit(self, sequence: Sequence) -> None:
        """Name the blocks that the step filled."""
        for depth in range(sequence.committed, sequence.computed // BLOCK_TOKENS):
            block = sequence.chain.block(depth)
            sequence.pages[depth], new = self._cache.insert(block, sequence.pages[depth], sequence.owner)
            if new:
                self._offload.offer(block)
            sequence.committed = depth + 1

    def _take_sampled(self, sequence: Sequence, sampled: Sampled) -> None:
        sequence.prefilled = True
        sequence.due = sampled.due
        tokens, finish = sequence.extend(sampled.tokens)
        if tokens and not sequence.first_token:
            sequence.first_token = time.time_ns()
        finish = finish or sampled.finish
        if finish is not None:
            error = "the model gave no usable distribution for the next token" if finish == "error" else ""
            self._finish(sequence, finish, tokens, error)
        elif tokens:
            self._report.tokens(sequence, tokens)

    def _finish(self, sequence: Sequence, finish: FinishReason, tokens: tuple[int, ...] = (), error: str = "") -> None:
        """Take a request out of wherever it is, and say so in its final delta with its last `tokens`."""
        request = sequence.request
        match request.state:
            case State.WAITING:
                self._waiting.remove(sequence)
                if sequence.prefetch:
                    self._offload.abandon(request.request_id)
                    self._resume.let_go(sequence)
                    sequence.restore_ends(time.time_ns())
            case State.WAITING_FOR_KV:
                self._restoring.remove(sequence)
                self._offload.abandon(request.request_id)
                self._resume.let_go(sequence)
                sequence.restore_ends(time.time_ns())
            case State.RUNNING:
                self._running.remove(sequence)
                self._resume.leave(sequence, keep=finish != "error", cut=finish == "cancel")
                self._pool.release(sequence.pages, sequence.owner)
            case State.FINISHED:
                raise ValueError(f"request {request.request_id} is finished already")
        sequence.pages = []
        request.state = State.FINISHED
        del self._active[request.request_id]
        if sequence.owner.ends(request.standing):
            self._weigh(sequence.owner)
        self._report.finished(sequence, finish, tokens, error)

    # What goes out.

    def result(self, fatal: str = "") -> StepResult | None:
        """All that happened since the last call; None when there is nothing to tell."""
        return self._report.take(self._load(), fatal)

    def _load(self) -> EngineLoad:
        pending = sum(len(sequence.tokens) for group in (self._waiting, self._restoring) for sequence in group)
        pending += sum(sequence.remaining for sequence in self._running if not sequence.prefilled)
        return EngineLoad(
            running=len(self._running) + len(self._restoring),
            waiting=len(self._waiting),
            queue_capacity=self._config.max_queue,
            pages_total=self._pool.size,
            pages_free=self._pool.available,
            pending_prefill_tokens=pending,
        )

    @property
    def idle(self) -> bool:
        """No request, no transfer and no call is under way."""
        return not self._active and self._offload.idle

    def check_integrity(self) -> None:
        """Raises AssertionError when the books disagree, or when pages are held though all is idle."""
        self._pool.check_integrity()
        self._checkpoints.check_integrity(self.idle)
        groups = self._waiting + self._restoring + self._running
        assert len(groups) == len(self._active) == len(set(groups)), "a request is in no queue, or in two"
        for group in (self._waiting, self._restoring, self._running):
            assert group == sorted(group, key=_order), "a queue is out of order"
        if self.idle:
            assert self._pool.available == self._pool.size, "pages leaked"


def _order(sequence: Sequence) -> int:
    return sequence.order
