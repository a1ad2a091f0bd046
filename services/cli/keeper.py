"""Keeps one service running: its first start, its restarts, its end."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.cli.child import Child
from services.cli.log_line import LogLine
from services.cli.service import Service

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 10.0
HEALTHY_SECONDS = 60.0
"""A service that was ready for this long is started again with the shortest delay."""
SHOWN_LINES = 20
"""Of a service's log, when its first start fails."""
BAD_SETTINGS = 2
"""Exit code of a service whose settings or model cannot be used."""


class StartFailed(Exception):
    """A service did not become ready at its first start.

    The message is for people, `tail` is the end of the service's log, `exit_code` is for the shell.
    """

    def __init__(self, message: str, tail: Sequence[LogLine] = (), exit_code: int = 1) -> None:
        super().__init__(message)
        self.tail = tail
        self.exit_code = exit_code


class Watcher(Protocol):
    """Who is told what happens (the console)."""

    def say(self, text: str) -> None: ...

    def log(self, line: LogLine) -> None: ...

    def starting(self, service: str, fraction: float | None, detail: str) -> None: ...

    def ready(self, service: str, seconds: float) -> None: ...


class Keeper:
    """All methods belong to one event loop."""

    def __init__(
        self, service: Service, start_timeout: float, watcher: Watcher, changed: Callable[[str, int | None], None]
    ) -> None:
        """`start_timeout`: seconds that a start may show no progress. `changed` gets the service's name and process
        id whenever it was started, and None for the id when it ended by itself."""
        self.service = service
        self._start_timeout = start_timeout
        self._watcher = watcher
        self._changed = changed
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start, and from then on keep it running. Raises StartFailed: no second try, the reason would be the same."""
        began = time.monotonic()
        down = await self._start_once()
        if down is not None:
            code = BAD_SETTINGS if down.exit_code == BAD_SETTINGS else 1
            raise StartFailed(f"{self.service.name} {down.reason}", down.tail, code)
        self._watcher.ready(self.service.name, time.monotonic() - began)
        self._task = asyncio.create_task(self._keep(), name=f"keeper of {self.service.name}")

    async def stop(self) -> None:
        """Restart it no more; SIGTERM, and SIGKILL after the service's grace."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._child is not None:
            await self._child.stop(self.service.grace)
            self._child = None

    def kill(self) -> None:
        """Restart it no more; SIGKILL."""
        if self._task is not None:
            self._task.cancel()
        if self._child is not None:
            self._child.kill()

    async def _keep(self) -> None:
        name = self.service.name
        delay = FIRST_DELAY_SECONDS
        while True:
            ready_at = time.monotonic()
            down: _Down | None = await self._until_down()
            began = time.monotonic()
            if began - ready_at >= HEALTHY_SECONDS:
                delay = FIRST_DELAY_SECONDS
            while down is not None:
                self._watcher.say(f"{name} {down}; starting it again in {delay:g} s")
                await asyncio.sleep(delay)
                delay = min(2 * delay, LONGEST_DELAY_SECONDS)
                down = await self._start_once()
            self._watcher.say(f"{name} is back after {time.monotonic() - began:.1f} s")

    async def _until_down(self) -> "_Down":
        child = self._child
        assert child is not None
        code = await child.wait()
        await self._forget(child)
        return _Down(_describe(code), child.tail(SHOWN_LINES), code)

    async def _start_once(self) -> "_Down | None":
        """None once the service is ready; else why it is not: its process ended, or showed no progress for the start
        timeout."""
        service = self.service
        self._watcher.starting(service.name, None, "starting")
        try:
            child = await Child.spawn(service.name, service.argv, service.environ, self._watcher.log)
        except OSError as error:
            return _Down(f"could not be started: {error}")
        self._child = child
        self._changed(service.name, child.pid)
        progress = _Progress()

        def report(fraction: float | None, detail: str) -> None:
            if progress.update(fraction, detail):
                self._watcher.starting(service.name, fraction, detail)

        ready = asyncio.ensure_future(service.ready(report))
        ended = asyncio.create_task(child.wait())
        stalled = asyncio.create_task(progress.stalled(self._start_timeout))
        tasks = {ready, ended, stalled}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                await self._forget(child)
                code = ended.result()
                return _Down(f"{_describe(code)} before it was ready", child.tail(SHOWN_LINES), code)
            if ready.done():
                return ready.result()
            await self._forget(child)
            doing = f" (last: {progress.detail})" if progress.detail else ""
            return _Down(f"showed no progress for {self._start_timeout:g} s{doing}", child.tail(SHOWN_LINES))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _forget(self, child: Child) -> None:
        await child.stop(0)  # what it may have left behind in its process group
        self._child = None
        self._changed(self.service.name, None)


@dataclass(frozen=True, slots=True)
class _Down:
    """Why a service does not run."""

    reason: str
    tail: Sequence[LogLine] = ()
    exit_code: int | None = None
    """Where its process ended by itself."""

    def __str__(self) -> str:
        """With its last words if it went by itself: usually its error message."""
        last = self.tail[-1].text if self.tail and self.exit_code is not None and self.exit_code > 0 else ""
        return f"{self.reason} ({last})" if last else self.reason


class _Progress:
    """Notices a start that stands still."""

    def __init__(self) -> None:
        self.detail = ""
        self._fraction: float | None = None
        self._at = time.monotonic()

    def update(self, fraction: float | None, detail: str) -> bool:
        """Whether this is news."""
        if (fraction, detail) == (self._fraction, self.detail):
            return False
        self._fraction, self.detail, self._at = fraction, detail, time.monotonic()
        return True

    async def stalled(self, seconds: float) -> None:
        """Returns when nothing new was reported for `seconds`."""
        while (left := self._at + seconds - time.monotonic()) > 0:  # noqa: ASYNC110 (it waits for silence)
            await asyncio.sleep(left)


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
