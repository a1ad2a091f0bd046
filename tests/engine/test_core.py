import logging
import queue
import threading
import time
from collections.abc import Iterator

import pytest

from services.engine.batch import ModelOutput, Runner, Sampled, ScheduledBatch, Transfer
from services.engine.core import EngineCore
from services.engine.mailbox import CancelRequest, KvLeased, Message, Snapshot, StepResult, Stop, Submit
from services.engine.scheduler import Scheduler, SchedulerConfig
from services.protocol.generate import TokenDelta
from tests.engine.rig import request
from tests.fakes import PAGE_BYTES, FakeKv, FakeRunner, Fate, continuation

SECONDS = 20


class Engine:
    """A core on its thread, and what it delivered."""

    def __init__(self, runner: Runner, pages: int = 16, kv: FakeKv | None = None) -> None:
        self.inbox: queue.SimpleQueue[Message] = kv.inbox if kv is not None else queue.SimpleQueue()
        self.results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()
        self.seen: list[StepResult] = []
        self.runner = runner
        self.steps = 0
        config = SchedulerConfig("fake", pages=pages, max_model_len=10_000, page_bytes=PAGE_BYTES)
        self.scheduler = Scheduler(config, kv)
        schedule = self.scheduler.schedule

        def counting() -> ScheduledBatch | None:
            self.steps += 1
            return schedule()

        self.scheduler.schedule = counting  # type: ignore[method-assign]
        core = EngineCore(self.scheduler, runner, self.inbox, self.results.put)
        self.thread = threading.Thread(target=core.run, daemon=True)
        self.thread.start()

    def result(self) -> StepResult:
        self.seen.append(self.results.get(timeout=SECONDS))
        return self.seen[-1]

    def drain(self) -> list[StepResult]:
        """Everything, once the core has ended."""
        while not self.results.empty():
            self.result()
        return self.seen

    def until_final(self, name: str) -> TokenDelta:
        while True:
            for _, delta in self.result().deltas:
                if delta.request_id == name and delta.finish is not None:
                    return delta

    def tokens_of(self, name: str) -> list[int]:
        deltas = [delta for result in self.seen for _, delta in result.deltas if delta.request_id == name]
        return [token for delta in deltas for token in delta.tokens]

    def stop(self) -> None:
        self.inbox.put(Stop())
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner(16)


@pytest.fixture
def engine(runner: FakeRunner) -> Iterator[Engine]:
    engine = Engine(runner)
    yield engine
    engine.stop()


def test_a_request_runs_to_its_end(engine: Engine, runner: FakeRunner) -> None:
    runner.expect("a", range(100))
    engine.inbox.put(Submit(request("a", list(range(100)), max_tokens=20)))
    assert engine.until_final("a").finish == "length"
    assert engine.tokens_of("a") == continuation(range(100), 20)


def test_the_load_is_told_before_anything_runs(engine: Engine) -> None:
    assert (engine.result().load.pages_total, engine.steps) == (16, 1)


def test_requests_of_several_threads_all_end(engine: Engine, runner: FakeRunner) -> None:
    for name in "abcdefgh":
        runner.expect(name, [ord(name)] * 70)
    threads = [
        threading.Thread(target=engine.inbox.put, args=(Submit(request(name, [ord(name)] * 70, 30)),))
        for name in "abcdefgh"
    ]
    for thread in threads:
        thread.start()
    left = set("abcdefgh")
    while left:
        left -= {delta.request_id for _, delta in engine.result().deltas if delta.finish}
    for name in "abcdefgh":
        assert engine.tokens_of(name) == continuation([ord(name)] * 70, 30)


def test_an_idle_core_sleeps(engine: Engine, runner: FakeRunner) -> None:
    runner.expect("a", [1])
    engine.inbox.put(Submit(request("a", [1], max_tokens=3)))
    engine.until_final("a")
    engine.inbox.put(Snapshot())
    assert engine.result().snapshot == ()
    steps = engine.steps
    for _ in range(3):
        engine.inbox.put(Snapshot())
        assert engine.result().snapshot == ()
    assert engine.steps <= steps + 3


def test_a_cancel_takes_effect_within_a_step(runner: FakeRunner) -> None:
    in_step, go_on = threading.Event(), threading.Event()

    def pause(batch: ScheduledBatch) -> None:
        if batch.step == 3:
            in_step.set()
            assert go_on.wait(SECONDS)

    runner.before_step = pause
    runner.keep_batches = True
    runner.expect("a", [1, 2, 3])
    engine = Engine(runner)
    engine.inbox.put(Submit(request("a", [1, 2, 3], max_tokens=1000)))
    assert in_step.wait(SECONDS)
    engine.inbox.put(CancelRequest("a"))
    engine.inbox.put(CancelRequest("b"))
    go_on.set()
    final = engine.until_final("a")
    assert (final.finish, final.offset) == ("cancel", 3)
    assert len(runner.batches) == 3
    engine.stop()


def test_a_broken_device_ends_every_request_and_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    runner = FakeRunner(16, fail_at=3)
    late: list[Message] = [Submit(request("late", [5], max_tokens=10))]

    def submit_late(batch: ScheduledBatch) -> None:
        if batch.step == 3:
            engine.inbox.put(late.pop())

    runner.before_step = submit_late
    for name in "ab":
        runner.expect(name, [1, 2])
    with caplog.at_level(logging.CRITICAL):
        engine = Engine(runner)
        for name in "ab":
            engine.inbox.put(Submit(request(name, [1, 2], max_tokens=10)))
        engine.thread.join(SECONDS)
    assert not engine.thread.is_alive()
    engine.drain()
    assert engine.seen[-1].fatal == "RuntimeError: the device fell off the bus"
    final = {delta.request_id: delta for _, delta in engine.seen[-1].deltas}
    assert set(final) == {"a", "b", "late"}
    assert {delta.finish for delta in final.values()} == {"error"}
    assert all(delta.usage is not None and "fell off the bus" in delta.error for delta in final.values())
    assert engine.tokens_of("a") == continuation([1, 2], len(engine.tokens_of("a")))
    assert runner.closed


def test_stop_closes_the_runner(runner: FakeRunner) -> None:
    engine = Engine(runner)
    engine.stop()
    assert runner.closed
    assert not any(result.fatal for result in engine.drain())


class Late:
    """A runner whose every second answer comes only after a while."""

    def __init__(self) -> None:
        self.runs: list[float] = []
        self.due = 0.0

    def run(self, batch: ScheduledBatch) -> ModelOutput:
        self.runs.append(time.monotonic())
        if time.monotonic() >= self.due and len(self.runs) > 1:
            return ModelOutput(batch.step, {row.request_id: Sampled((5,), "stop") for row in batch.rows})
        self.due = time.monotonic() + 0.05
        return ModelOutput(batch.step, {row.request_id: Sampled(()) for row in batch.rows}, wake_at=self.due)

    def close(self) -> None:
        pass


def test_the_loop_sleeps_until_the_runner_wants_to_be_woken() -> None:
    runner = Late()
    engine = Engine(runner)
    engine.inbox.put(Submit(request("a", [1], max_tokens=10)))
    assert engine.until_final("a").tokens == (5,)
    assert len(runner.runs) == 2
    assert runner.runs[1] - runner.runs[0] >= 0.05
    engine.stop()


def test_a_message_wakes_a_loop_that_waits_for_the_runner() -> None:
    runner = Late()
    runner.due = time.monotonic() + 3600
    engine = Engine(runner)
    engine.inbox.put(Submit(request("a", [1], max_tokens=10)))
    engine.inbox.put(CancelRequest("a"))
    assert engine.until_final("a").finish == "cancel"
    engine.stop()


def test_transfers_are_polled_while_nothing_runs(runner: FakeRunner) -> None:
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    store = FakeKv(inbox, automatic=True)
    store.connect()
    polls: list[str] = []

    def fate(transfer: Transfer) -> Fate:
        polls.append(transfer.kind)
        return "done" if len(polls) >= 5 else "wait"

    runner.fate = fate
    runner.expect("a", range(70))
    engine = Engine(runner, kv=store)
    engine.inbox.put(Submit(request("a", list(range(70)), max_tokens=1)))
    stored = 0
    while stored < 1:
        stored += engine.result().stats.stored_blocks
    assert len(polls) == 5
    assert len(store.committed) == 1
    engine.stop()


def test_an_error_of_our_own_is_fatal_too(runner: FakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL):
        engine = Engine(runner)
        engine.inbox.put(KvLeased(1, None, 0, ()))
        engine.thread.join(SECONDS)
    assert "lease 1, which was not asked" in engine.drain()[-1].fatal
    assert runner.closed


def test_books_that_are_broken_beyond_answering_are_fatal_still(
    runner: FakeRunner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.expect("a", [1])
    runner.fail_at = 1

    def broken(error: str) -> None:
        raise KeyError("lost")

    with caplog.at_level(logging.CRITICAL):
        engine = Engine(runner)
        monkeypatch.setattr(engine.scheduler, "fail", broken)
        engine.inbox.put(Submit(request("a", [1], max_tokens=3)))
        engine.thread.join(SECONDS)
    assert "fell off the bus" in engine.drain()[-1].fatal
    assert runner.closed
