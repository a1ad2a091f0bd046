"""The one task that writes the session database. Whoever records never waits for it.

A file that cannot be used (locked, full, read-only, corrupt, gone) costs rows, never an answer: rows wait in a bounded
queue while the file is tried again with growing pauses; what finds the queue full is dropped and counted.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import islice

from services.gateway.sessions.database import Database, is_fault, reason
from services.gateway.sessions.rows import Row, size

log = logging.getLogger(__name__)

COMPLAIN_SECONDS = 60.0
"""A warning about rows at most this often."""


@dataclass(frozen=True, slots=True)
class Limits:
    queue_rows: int = 4096
    """Rows that may wait."""
    queue_bytes: int = 64 * 2**20
    """Bytes of texts among them that may wait."""
    batch_rows: int = 256
    """Rows of one transaction at most."""
    busy_seconds: float = 2.0
    """Wait for another process's lock, before that counts as a failure."""
    retry_first: float = 0.5
    """Seconds from a failure to the next try; doubles up to `retry_longest`."""
    retry_longest: float = 30.0


class Writer:
    """Owns the database's writing side. All methods on the event loop."""

    def __init__(self, database: Database, limits: Limits, opened: Callable[[], Awaitable[None]]) -> None:
        """`opened` is awaited each time that the database was opened, before anything is written to it."""
        self._database = database
        self._limits = limits
        self._opened = opened
        self._rows: deque[Row] = deque()
        self._bytes = 0
        """Of the rows in the queue."""
        self._wake = asyncio.Event()
        """There are rows to write, or it is time to stop."""
        self._idle = asyncio.Event()
        """There are no rows to write."""
        self._idle.set()
        self._tried = asyncio.Event()
        """The first try to open the file is over."""
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._one_by_one = 0
        """So many of the next rows are written alone, since one of them is bad."""
        self._failing = False
        self._complained = -math.inf
        self._told = False
        """There was a complaint, and no word yet that it is over."""
        self.dropped = 0
        """Rows lost since the start."""

    @property
    def waiting(self) -> int:
        """Rows in the queue."""
        return len(self._rows)

    async def start(self, seconds: float) -> None:
        """Returns when the first try to open the database is over, whatever came of it, or after `seconds`."""
        self._task = asyncio.create_task(self._run(), name="session-writer")
        await _wait(self._tried, seconds)

    def put(self, row: Row) -> None:
        """Hand over a row. It is dropped and counted when the queue is full or the writer was closed."""
        if self._stopping.is_set():
            self.drop(1, "the gateway is stopping")
        elif len(self._rows) >= self._limits.queue_rows or self._bytes + size(row) > self._limits.queue_bytes:
            self.drop(1, "too many rows wait to be written")
        else:
            self._rows.append(row)
            self._bytes += size(row)
            self._idle.clear()
            self._wake.set()

    def drop(self, rows: int, why: str) -> None:
        """Count lost rows, and say so once in a while."""
        self.dropped += rows
        self._complain(why)

    async def flush(self, seconds: float) -> bool:
        """Wait until no row waits; False when that takes longer than `seconds`."""
        return await _wait(self._idle, seconds)

    async def close(self, seconds: float) -> None:
        """Write what waits, for `seconds` at most and without retries, and close the database. The rest is dropped."""
        self._stopping.set()
        self._wake.set()
        if self._task is not None:
            _, late = await asyncio.wait({self._task}, timeout=seconds)
            if late:
                self._task.cancel()
                await asyncio.wait({self._task}, timeout=0.5)
        if self._rows:
            lost = len(self._rows)
            self._rows.clear()
            self._bytes = 0
            self._complained = -math.inf
            self.drop(lost, "the gateway stopped before all rows were written")
        self._idle.set()
        await self._database.close()

    async def _run(self) -> None:
        pause = self._limits.retry_first
        while True:
            try:
                await self._write_all()
            except Exception as error:
                self._failed(error)
            else:
                self._recovered()
                pause = self._limits.retry_first
            self._tried.set()
            if self._stopping.is_set():
                return
            if self._failing:
                await _wait(self._stopping, pause)
                pause = min(2 * pause, self._limits.retry_longest)
            else:
                await self._wake.wait()

    async def _write_all(self) -> None:
        """Returns when the database is open and no row waits. Raises when the file cannot be used."""
        while True:
            if await self._database.ensure_open():
                await self._opened()
            if not self._rows:
                self._wake.clear()
                self._idle.set()
                return
            batch = list(islice(self._rows, 1 if self._one_by_one else self._limits.batch_rows))
            try:
                await self._database.write(batch)
            except Exception as error:
                if is_fault(error):
                    raise
                if len(batch) > 1:
                    self._one_by_one = len(batch)
                    continue
                self.drop(1, f"a row cannot be written: {reason(error)}")
            for _ in batch:
                self._bytes -= size(self._rows.popleft())
            self._one_by_one = max(0, self._one_by_one - len(batch))

    def _failed(self, error: Exception) -> None:
        self._failing = True
        self._complain(f"the database cannot be used: {reason(error)}", None if is_fault(error) else error)
        self._database.distrust()

    def _recovered(self) -> None:
        if self._failing and self._told:
            log.warning("sessions: the database can be used again; %d rows were lost since the start", self.dropped)
            self._told = False
        self._failing = False

    def _complain(self, why: str, trace: Exception | None = None) -> None:
        now = time.monotonic()
        if now - self._complained >= COMPLAIN_SECONDS:
            self._complained = now
            self._told = True
            log.warning(
                "sessions: %s (%d rows lost since the start, %d wait)",
                why,
                self.dropped,
                len(self._rows),
                exc_info=trace,
            )


async def _wait(event: asyncio.Event, seconds: float) -> bool:
    """Whether the event was set within `seconds`."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
