"""Core and scheduler on a fake device and a fake kvstore, stepped by hand, with everything that must hold checked."""

import queue
from collections import defaultdict

from services.engine.batch import ScheduledBatch, Transfer
from services.engine.core import EngineCore
from services.engine.mailbox import CancelRequest, Message, StepResult, Submit
from services.engine.request import Request
from services.engine.scheduler import Scheduler, SchedulerConfig
from services.protocol.events import EngineLoad
from services.protocol.generate import FinishReason, SamplingParams, Standing, TokenDelta, Usage
from services.protocol.hashing import BLOCK_TOKENS
from tests.fakes import PAGE_BYTES, STATE_BYTES, FakeKv, FakeRunner, Fate, continuation

FINGERPRINT = "fake"


def request(
    name: str,
    prompt: list[int],
    max_tokens: int = 8,
    generated: list[int] | None = None,
    stop: tuple[int, ...] = (),
    salt: str = "",
    hints: tuple[int, ...] = (),
    session: str = "",
    standing: Standing = "idle",
) -> Request:
    generated = generated or []
    return Request(
        request_id=name,
        gateway_id="gateway",
        prompt=list(prompt),
        output=list(generated),
        resumed=len(generated),
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=stop),
        cache_salt=salt,
        hints=hints,
        session_id=session,
        standing=standing,
    )


class Rig:
    """Keeps the books of what each request was told."""

    def __init__(
        self,
        pages: int = 32,
        max_batch_tokens: int = 256,
        max_running: int = 8,
        max_model_len: int = 100_000,
        kv: bool = False,
        kv_capacity: int = 1 << 12,
        kv_automatic: bool = True,
        slots: int = 0,
        interval: int = 8192,
        gap: int = 64,
    ) -> None:
        """`slots`: of recurrent states; 0 is a model without."""
        self.pages = pages
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.store = FakeKv(self.inbox, kv_capacity, kv_automatic)
        if kv:
            self.store.connect()
        config = SchedulerConfig(
            fingerprint=FINGERPRINT,
            pages=pages,
            max_model_len=max_model_len,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            page_bytes=PAGE_BYTES,
            state_slots=slots,
            state_bytes=STATE_BYTES,
            checkpoint_interval=interval,
            checkpoint_gap=gap,
        )
        self.scheduler = Scheduler(config, self.store if kv else None)
        self.runner = FakeRunner(pages, slots, before_step=self.check_batch)
        self.core = EngineCore(self.scheduler, self.runner, self.inbox, self.take)
        self.max_batch_tokens = max_batch_tokens
        self.max_model_len = min(max_model_len, pages * BLOCK_TOKENS)
        self.requests: dict[str, Request] = {}
        self.prompts: dict[str, list[int]] = {}
        self.told: defaultdict[str, list[int]] = defaultdict(list)
        self.cached: dict[str, int | None] = {}
        """What was told with the first tokens."""
        self.final: dict[str, TokenDelta] = {}
        self.on_device: set[bytes] = set()
        self.results: list[StepResult] = []
        self.load = EngineLoad()

    def submit(self, what: Request) -> None:
        assert what.request_id not in self.requests
        self.requests[what.request_id] = what
        self.prompts[what.request_id] = list(what.prompt)
        self.told[what.request_id] = list(what.output)
        self.runner.expect(what.request_id, what.prompt, what.cache_salt)
        self.inbox.put(Submit(what))

    def cancel(self, name: str) -> None:
        self.inbox.put(CancelRequest(name))

    def step(self) -> bool:
        """What the core's loop does until it waits again. False: it waits, and nothing but a message can wake it."""
        if self.inbox.empty() and self.core.resume_at is None:
            return False
        while not self.inbox.empty():
            self.core.handle(self.inbox.get())
        self.core.step()
        self.scheduler.check_integrity()
        assert self.runner.most_tokens <= self.max_batch_tokens
        return True

    def check_batch(self, batch: ScheduledBatch) -> None:
        for transfer in batch.transfers:
            assert transfer.arena is self.store.arena, "a copy begins though its connection is lost"

    def take(self, result: StepResult) -> None:
        self.results.append(result)
        self.load = result.load
        assert not set(result.stored) & set(result.removed)
        assert not set(result.stored) & self.on_device
        assert set(result.removed) <= self.on_device
        self.on_device = (self.on_device | set(result.stored)) - set(result.removed)
        assert len([d for _, d in result.deltas if d.finish]) == len(result.finished)
        for gateway, delta in result.deltas:
            name = delta.request_id
            assert gateway == "gateway"
            assert name not in self.final, f"{name} goes on after its final delta"
            assert delta.offset == len(self.told[name]), f"{name} has a gap"
            self.told[name] += delta.tokens
            if delta.finish is not None:
                assert delta.usage is not None
                self.final[name] = delta
                self.check_answer(name)
            else:
                assert delta.tokens
                assert delta.usage is None
                if delta.offset == self.requests[name].resumed:
                    self.cached[name] = delta.cached
                else:
                    assert delta.cached is None
        for timeline in result.finished:
            assert timeline.finish == self.final[timeline.request_id].finish
            assert timeline.usage == self.final[timeline.request_id].usage
            times = (timeline.arrived, timeline.scheduled, timeline.first_token, timeline.finished)
            passed = [time for time in times if time]
            assert passed == sorted(passed)
            assert timeline.restore_started <= timeline.restore_ended <= timeline.finished

    def check_answer(self, name: str) -> None:
        what, told, usage = self.requests[name], self.told[name], self.usage(name)
        prompt = self.prompts[name]
        assert what.prompt == prompt, "the prompt was changed"
        assert told == continuation(prompt, len(told), what.cache_salt), f"{name} differs from a cold run"
        stops = [index for index, token in enumerate(told) if token in what.sampling.stop_token_ids]
        finish = self.final[name].finish
        assert stops in ([], [len(told) - 1])
        assert (finish == "stop") == bool(stops)
        limit = min(what.sampling.max_tokens, self.max_model_len - len(prompt))
        if finish == "length":
            assert len(told) == max(limit, what.resumed)
        else:
            assert finish == "cancel" or len(told) <= limit
        assert usage.restore_seconds <= usage.queue_seconds
        assert usage.prompt_tokens == len(prompt)
        assert usage.output_tokens == len(told)
        ran = self.runner.prompt_tokens_run.get(name, 0)
        # Without a state, asking again for the logits of a known position runs a token, which counts once.
        assert usage.computed_tokens == ran if self.runner.slots else usage.computed_tokens <= ran
        assert self.cached.get(name, usage.cached_tokens) == usage.cached_tokens, "a client was told another number"
        if told[what.resumed :]:
            assert usage.cached_tokens + usage.computed_tokens >= len(prompt)
            if not usage.preemptions:
                assert usage.cached_tokens + usage.computed_tokens == len(prompt)

    def usage(self, name: str) -> Usage:
        usage = self.final[name].usage
        assert usage is not None
        return usage

    def finish_of(self, name: str) -> FinishReason | None:
        return self.final[name].finish

    def run(self, steps: int = 10_000) -> None:
        """Step until nothing is left to do; the calls to the store must be answered by then."""
        for _ in range(steps):
            if not self.step():
                return
        raise AssertionError(f"not done after {steps} steps")

    def serve(self, *requests: Request) -> None:
        """Run these to their ends."""
        for what in requests:
            self.submit(what)
        self.run()

    def settle(self) -> None:
        """Let everything end, and check that nothing is left over."""
        self.runner.fate = _done
        self.runner.burst = _one
        self.store.automatic = True
        for _ in range(100_000):
            while self.store.calls:
                self.store.answer()
            if not self.step():
                break
        assert self.scheduler.idle, "something waits for ever"
        assert set(self.final) == set(self.requests), "a request was never finished"
        assert self.load.running == self.load.waiting == self.load.pending_prefill_tokens == 0
        assert self.load.pages_free == self.pages
        self.store.check_idle()
        self.scheduler.snapshot()
        result = self.scheduler.result()
        assert result is not None
        assert set(result.snapshot or ()) == self.on_device


def _done(transfer: Transfer) -> Fate:
    return "done"


def _one(name: str, position: int) -> int:
    return 1
