"""Decides how many tokens of which running requests a step runs, and gets the pages for them."""

import time

from services.engine.cache.block_pool import BlockPool
from services.engine.cache.offload import Offload
from services.engine.miss import missed
from services.engine.request import State
from services.engine.resume import Resume
from services.engine.scheduler_config import SchedulerConfig
from services.engine.sequence import Sequence
from services.engine.step_plan import StepPlan
from services.protocol.hashing import BLOCK_TOKENS

PATIENCE = 0.25
"""Seconds that a prefill waits at most for blocks to be copied to the kvstore whose pages it needs. Each saves its
context some milliseconds; a store that answers takes about one for all of them."""
PLENTY = 4
"""Pages for each running request, above which those that are wanted a step early take nothing from anybody."""


def pages_of(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


class Planner:
    """Decodes first, then prefills, the oldest first; a request that finds no page takes them from the youngest. On the
    core's thread."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, offload: Offload, resume: Resume) -> None:
        self._config = config
        self._pool = pool
        self._offload = offload
        self._resume = resume
        self._running: list[Sequence] = []
        self.due: float | None = None
        """time.monotonic() when the first of those that the last plan left out for a time may run."""

    def plan(self, running: list[Sequence]) -> StepPlan:
        """A step of the `running` requests (by order). Those that had to give up their pages are taken out of the list,
        in state WAITING, and named in the plan."""
        self._running = running
        now = time.monotonic()
        plan = StepPlan(self._config.max_batch_tokens)
        self._plan_decodes(plan, now)
        self._plan_prefills(plan, now)
        dues = [sequence.due for sequence in running if sequence.due > now]
        dues += [sequence.patience for sequence in running if sequence.patience > now]
        self.due = min(dues, default=None)
        return plan

    def _plan_decodes(self, plan: StepPlan, now: float) -> None:
        """Let all decode whose time has come; where the step cannot hold them, those longest without a turn."""
        decoding = [sequence for sequence in self._running if sequence.prefilled and sequence.due <= now]
        kept = 0
        if any(not sequence.prefilled for sequence in self._running):
            kept = max(1, plan.left // 4)  # for the prefills; more than enough decodes must not shut them out
        if len(decoding) > plan.left - kept:
            decoding.sort(key=lambda sequence: sequence.turn)
        for sequence in decoding:
            self._reserve(sequence, plan.left - kept, plan, now)

    def _plan_prefills(self, plan: StepPlan, now: float) -> None:
        """Give what the decodes left to the prefills, the oldest first. One that would compute what an older one is
        about to leave for others waits for that."""
        prefills = [sequence for sequence in self._running if not sequence.prefilled]
        self._resume.meet(prefills)
        for sequence in prefills:
            if plan.left <= 0:
                return
            if sequence.request.state is State.RUNNING:  # not preempted meanwhile
                self._resume.catch_up(sequence)
                awaited = self._resume.awaited(sequence)
                if awaited is None or awaited not in plan.awaited:
                    self._explain(sequence)
                    self._reserve(sequence, plan.left, plan, now)
                if awaited is not None:
                    plan.awaited.add(awaited)

    def _explain(self, sequence: Sequence) -> None:
        """Before its first pages are taken, perhaps from what it would have gone on from."""
        if not sequence.explained:
            sequence.explained = True
            recurrent, connected = self._config.state_slots > 0, self._offload.connected
            sequence.missed = missed(sequence, self._pool, connected=connected, recurrent=recurrent)

    def _reserve(self, sequence: Sequence, budget: int, plan: StepPlan, now: float) -> None:
        """Plan up to `budget` tokens of a request and get the pages for them, in need from younger requests."""
        if budget <= 0 or sequence.request.state is not State.RUNNING:  # preempted by an older one in this very step
            return
        count = min(max(sequence.rerun, sequence.remaining), budget)
        stop = self._resume.next_stop(sequence)
        if stop is not None and stop <= sequence.computed + count:
            count = stop - sequence.computed
        elif count < sequence.remaining:  # end the chunk with a block, so that the next one may be found in the cache
            end = (sequence.computed + count) // BLOCK_TOKENS * BLOCK_TOKENS
            count = end - sequence.computed if end > sequence.computed else count
        missing = pages_of(min(sequence.computed + count, len(sequence.tokens))) - len(sequence.pages)
        if missing > 0:
            missing = min(missing, self._at_once(sequence, missing, now))
            while missing and self._pool.available == 0 and (victim := self._running[-1]) is not sequence:
                self._preempt(victim, plan)
            sequence.pages += self._pool.allocate(min(missing, self._pool.available), sequence.owner.session)
            count = min(count, len(sequence.pages) * BLOCK_TOKENS - sequence.computed)
        if count > 0 or sequence.remaining == 0:
            plan.add(sequence, count)
            if sequence.prefilled:
                self._page_ahead(sequence)

    def _at_once(self, sequence: Sequence, missing: int, now: float) -> int:
        """How many of its `missing` pages a request should take just now: a prefill lets the kvstore have first what
        would be given up for them. For a moment only: a store that hangs must not stop it."""
        pool = self._pool
        if sequence.prefilled or missing <= pool.safe or pool.available == 0 or not self._offload.connected:
            sequence.patience = 0.0
            return missing
        if not sequence.patience:
            sequence.patience = now + PATIENCE
        return pool.safe if now < sequence.patience else missing

    def _page_ahead(self, sequence: Sequence) -> None:
        """Have the page of the next token a step early, where pages are plenty: the runner may start that step before
        it is scheduled."""
        wanted = pages_of(min(len(sequence.tokens) + 1, self._config.max_model_len))
        if wanted > len(sequence.pages) and self._pool.safe > PLENTY * len(self._running):
            sequence.pages += self._pool.allocate(1, sequence.owner.session)

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        """Take all pages of a running request."""
        self._running.remove(sequence)
        plan.preempt(sequence)
        self._resume.leave(sequence, keep=True)
        self._pool.release(sequence.pages, sequence.owner)
        sequence.preempted()
