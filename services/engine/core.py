"""The step loop: receive, schedule, run, update, deliver. The only loop of the engine, on one thread."""

import logging
import queue
import time
from collections.abc import Callable

from services.engine.batch import ModelOutput, Runner, ScheduledBatch
from services.engine.mailbox import (
    CancelRequest,
    Inspect,
    KvConnected,
    KvLeased,
    KvReserved,
    Message,
    NoteSession,
    Snapshot,
    StepResult,
    StepStats,
    Stop,
    Submit,
)
from services.engine.scheduler import Scheduler
from services.protocol.events import EngineLoad

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.0005
"""Between looks at transfers when nothing else runs: a 2 MiB block takes 40 us on PCIe 5."""


class EngineCore:
    """Owns scheduler and runner while `run` runs; others reach it by the inbox only."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        inbox: "queue.SimpleQueue[Message]",
        deliver: Callable[[StepResult], None],
    ) -> None:
        """`deliver` is called on the core's thread; it must only hand the result over."""
        self._scheduler = scheduler
        self._runner = runner
        self._inbox = inbox
        self._deliver = deliver
        self.resume_at: float | None = 0.0
        """time.monotonic() at which to step again even if no message comes; None: never."""

    def run(self) -> None:
        """Step until Stop. An error of the device (or of ours) ends every request and then the loop, with a fatal
        result. The runner is closed in any case."""
        try:
            while self._receive():
                self.step()
        except Exception as error:
            log.exception("the step loop has ended on an error")
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            self._runner.close()

    def step(self) -> None:
        """Run what can run, and say when to come back."""
        batch = self._scheduler.schedule()
        if batch is None:
            self.resume_at = self._scheduler.next_due
        else:
            began = time.monotonic()
            output = self._runner.run(batch)
            self._scheduler.update(output, time.monotonic() - began)
            self.resume_at = self._after(batch, output, began)
        if (result := self._scheduler.result()) is not None:
            self._deliver(result)

    def _after(self, batch: ScheduledBatch, output: ModelOutput, began: float) -> float | None:
        """When to step again after this one: at once if anything has come of it."""
        if (batch.rows and output.wake_at is None) or output.transfers_done or output.transfers_failed:
            return 0.0
        poll = began + _POLL_SECONDS if self._scheduler.transfers_under_way else None
        return min((at for at in (output.wake_at, self._scheduler.next_due, poll) if at is not None), default=None)

    def _receive(self) -> bool:
        """Handle all messages that are there, after waiting for the first until `resume_at`. False: Stop came."""
        try:
            message = self._next()
            while True:
                if isinstance(message, Stop):
                    return False
                self.handle(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return True

    def _next(self) -> Message:
        if self.resume_at is None:
            return self._inbox.get()
        seconds = self.resume_at - time.monotonic()
        return self._inbox.get(timeout=seconds) if seconds > 0 else self._inbox.get_nowait()

    def handle(self, message: Message) -> None:
        """Take in any message but Stop. A step must follow."""
        match message:
            case Submit(request):
                self._scheduler.submit(request)
            case CancelRequest(request_id):
                self._scheduler.cancel(request_id)
            case KvLeased() | KvReserved() | KvConnected():
                self._scheduler.receive(message)
            case NoteSession(session_id, standing):
                self._scheduler.note(session_id, standing)
            case Snapshot():
                self._scheduler.snapshot()
            case Inspect():
                self._scheduler.inspect()

    def _fail(self, error: str) -> None:
        try:  # requests that came while the device was failing are answered as well
            while True:
                message = self._inbox.get_nowait()
                if isinstance(message, Submit):
                    self._scheduler.submit(message.request)
        except queue.Empty:
            pass
        try:
            self._scheduler.fail(error)
            result = self._scheduler.result(fatal=error)
        except Exception:  # it may be the books that are broken; that the engine is lost must be told all the same
            log.exception("the requests could not be answered")
            result = None
        self._deliver(result or StepResult((), EngineLoad(), StepStats(), fatal=error))
