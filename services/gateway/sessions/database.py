"""The session database: one SQLite file (or memory), opened, migrated, written in batches and read."""

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import URL, Connection, delete, event, func, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import DatabaseError, DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool

from services.gateway.sessions import schema
from services.gateway.sessions.answers import ANSWERS_IN_MEMORY, read_answers, write_answers
from services.gateway.sessions.bounded import RowBounds
from services.gateway.sessions.calls import CALLS_IN_MEMORY, read_calls, write_calls
from services.gateway.sessions.lineage import Conversation
from services.gateway.sessions.models import RequestRow, SessionRow
from services.gateway.sessions.records import (
    AnswerRecord,
    CallRecord,
    RequestSummary,
    ResponseRecord,
    SessionDetail,
    SessionSummary,
)
from services.gateway.sessions.responses import IN_MEMORY, ResponseBounds, read_response, write_responses
from services.gateway.sessions.rows import UPSERT_SESSION, Entry, Row, request_values, session_values, text

log = logging.getLogger(__name__)

MEMORY_ROWS = 10_000
"""Requests kept at most where there is no file."""
_DISPOSE_SECONDS = 1.0


class SessionsUnavailable(Exception):
    """The database cannot be read just now; the message says why."""


class Database:
    """One database. Used by one event loop: a single writer calls `ensure_open`, `write` and `close`; anyone reads."""

    def __init__(
        self,
        path: str,
        max_rows: int,
        responses: ResponseBounds,
        calls: RowBounds,
        answers: RowBounds,
        busy_seconds: float,
    ) -> None:
        """`path` empty: in memory, gone with `close`. `max_rows`: requests kept. `busy_seconds`: how long to wait for
        another process's lock."""
        self._path = Path(path).expanduser() if path else None
        self._max_rows = max_rows
        self._responses = responses
        self._calls = calls
        self._answers = answers
        self._busy_seconds = busy_seconds
        self._engine: AsyncEngine | None = None
        self._distrusted = False
        self._file: tuple[int, int] | None = None

    @property
    def persistent(self) -> bool:
        return self._path is not None

    async def ensure_open(self) -> bool:
        """Open and migrate unless that is done; True when it had to. A file that was removed or replaced meanwhile is
        left, and the new one opened. A file of a newer version is left alone: memory takes its place, for good.

        Raises what `is_fault` knows when the file cannot be used; what was open before can still be read.
        """
        if self._engine is not None and not self._distrusted and self._file == await asyncio.to_thread(self._identity):
            return False
        if self._path is not None:
            await asyncio.to_thread(self._path.parent.mkdir, parents=True, exist_ok=True)
        try:
            engine = await self._open()
        except schema.NewerDatabase as newer:
            log.error("%s was written by a newer version: %s. Sessions are kept in memory.", self._path, newer)
            self._path = None
            engine = await self._open()
        await self.close()
        self._engine = engine
        self._distrusted = False
        return True

    def distrust(self) -> None:
        """A write failed: open the file afresh before the next."""
        self._distrusted = True

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await _dispose(engine)

    async def write(self, rows: Sequence[Row]) -> None:
        """Write all rows in one transaction, except those that were written before (so that a batch whose fate is
        unknown may be written again), and prune. Raises what SQLAlchemy raises; then nothing is written."""
        entries = [row for row in rows if isinstance(row, Entry)]
        calls = [row for row in rows if isinstance(row, CallRecord)]
        answers = [row for row in rows if isinstance(row, AnswerRecord)]
        responses = [row for row in rows if not isinstance(row, Entry | CallRecord | AnswerRecord)]
        async with self._opened().execution_options(begin="BEGIN IMMEDIATE").begin() as connection:
            if entries:
                await self._write_requests(connection, entries)
            if responses:
                bounds = self._responses if self.persistent else self._responses.within(IN_MEMORY)
                await write_responses(connection, responses, bounds)
            if calls:
                await write_calls(
                    connection, calls, self._calls if self.persistent else self._calls.within(CALLS_IN_MEMORY)
                )
            if answers:
                kept = self._answers if self.persistent else self._answers.within(ANSWERS_IN_MEMORY)
                await write_answers(connection, answers, kept)

    async def _write_requests(self, connection: AsyncConnection, entries: Sequence[Entry]) -> None:
        by_id = {text(entry.record.request_id): entry for entry in entries}
        written = await connection.scalars(select(RequestRow.id).where(RequestRow.id.in_(by_id)))
        for request_id in written.all():
            del by_id[request_id]
        if sessions := [session_values(entry) for entry in by_id.values() if entry.record.session_id]:
            await connection.execute(UPSERT_SESSION, sessions)
        if requests := [request_values(entry.record) for entry in by_id.values()]:
            await connection.execute(insert(RequestRow), requests)
        newest = select(func.max(RequestRow.number)).scalar_subquery()
        rows = self._max_rows if self.persistent else min(self._max_rows, MEMORY_ROWS)
        pruned = await connection.execute(delete(RequestRow).where(RequestRow.number <= newest - rows))
        if pruned.rowcount > 0:
            oldest = select(func.min(RequestRow.arrived)).scalar_subquery()
            await connection.execute(delete(SessionRow).where(SessionRow.last_seen < oldest))

    async def sessions(self, limit: int, offset: int) -> tuple[list[SessionSummary], int]:
        """A page of sessions, newest first, and how many there are. Raises SessionsUnavailable."""
        newest_first = select(SessionRow).order_by(SessionRow.last_seen.desc(), SessionRow.id)
        try:
            async with AsyncSession(self._opened()) as session:
                rows = (await session.scalars(newest_first.limit(limit).offset(offset))).all()
                total = await session.scalar(select(func.count()).select_from(SessionRow))
        except Exception as error:
            raise _unavailable(error) from error
        return [msgspec.convert(row, SessionSummary, from_attributes=True) for row in rows], total or 0

    async def session(self, session_id: str, requests: int) -> SessionDetail | None:
        """A session with its last `requests` requests; None when there is none. Raises SessionsUnavailable."""
        of_session = select(RequestRow).where(RequestRow.session_id == session_id)
        try:
            async with AsyncSession(self._opened()) as session:
                row = await session.get(SessionRow, session_id)
                last = (await session.scalars(of_session.order_by(RequestRow.number.desc()).limit(requests))).all()
        except Exception as error:
            raise _unavailable(error) from error
        if row is None:
            return None
        return SessionDetail(
            session=msgspec.convert(row, SessionSummary, from_attributes=True),
            requests=[msgspec.convert(request, RequestSummary, from_attributes=True) for request in last],
        )

    async def response(self, id: str) -> ResponseRecord | None:
        """A stored response, or None. Raises SessionsUnavailable."""
        try:
            async with AsyncSession(self._opened()) as session:
                return await read_response(session, id)
        except Exception as error:
            raise _unavailable(error) from error

    async def calls(self, ids: Sequence[str]) -> list[CallRecord]:
        """Those of these generated calls that are known. Raises SessionsUnavailable."""
        try:
            async with AsyncSession(self._opened()) as session:
                return await read_calls(session, ids)
        except Exception as error:
            raise _unavailable(error) from error

    async def answers(self, places: Sequence[bytes], calls: Sequence[str]) -> list[AnswerRecord]:
        """As `answers.read_answers`. Raises SessionsUnavailable."""
        try:
            async with AsyncSession(self._opened()) as session:
                return await read_answers(session, places, calls)
        except Exception as error:
            raise _unavailable(error) from error

    async def conversations(self, limit: int) -> list[Conversation]:
        """The sessions seen last whose lineage is known, in the order in which they were first seen."""
        known = select(SessionRow).where(func.length(SessionRow.tail) > 0)
        async with AsyncSession(self._opened()) as session:
            rows = (await session.scalars(known.order_by(SessionRow.last_seen.desc()).limit(limit))).all()
        return [
            Conversation(row.id, row.source, row.parent, row.opening, row.tail)
            for row in sorted(rows, key=lambda row: row.first_seen)
        ]

    async def _open(self) -> AsyncEngine:
        engine = create_async_engine(
            URL.create("sqlite+aiosqlite", database=str(self._path) if self._path else None),
            # None: the driver begins no transaction by itself, so that BEGIN and DDL obey SQLAlchemy.
            connect_args={"timeout": self._busy_seconds, "isolation_level": None},
            poolclass=AsyncAdaptedQueuePool,
            # A database in memory is its one connection.
            pool_size=4 if self._path else 1,
            max_overflow=0,
        )
        event.listen(engine.sync_engine, "connect", _set_pragmas)
        event.listen(engine.sync_engine, "begin", _begin)
        try:
            async with engine.connect() as connection:
                current = await connection.run_sync(schema.is_current)
            if not current:
                # Immediate: another gateway may be migrating the same file.
                async with engine.execution_options(begin="BEGIN IMMEDIATE").begin() as connection:
                    await connection.run_sync(schema.upgrade)
            self._file = await asyncio.to_thread(self._identity)
        except BaseException:
            await _dispose(engine)
            raise
        return engine

    def _identity(self) -> tuple[int, int] | None:
        """Which file lies at the path: SQLite would go on writing to one that was removed."""
        if self._path is None:
            return None
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def _opened(self) -> AsyncEngine:
        if self._engine is None:
            raise SessionsUnavailable("the session database is not open")
        return self._engine


def is_fault(error: BaseException) -> bool:
    """Whether an error is one of the file or the disk, that may pass: not of what was to be written."""
    passing = OSError | OperationalError | PoolTimeout | SessionsUnavailable
    # The bare DatabaseError is SQLite's for a corrupt file; its other subclasses are about what was asked.
    return isinstance(error, passing) or type(error) is DatabaseError


def reason(error: BaseException) -> str:
    """An error in a few words, without SQLAlchemy's statement, parameters and link."""
    return str(error.orig if isinstance(error, DBAPIError) else error) or type(error).__name__


def _unavailable(error: Exception) -> SessionsUnavailable:
    if isinstance(error, SessionsUnavailable):
        return error
    return SessionsUnavailable(f"the session database cannot be read: {reason(error)}")


async def _dispose(engine: AsyncEngine) -> None:
    try:
        await asyncio.wait_for(engine.dispose(), _DISPOSE_SECONDS)
    except Exception as error:
        log.debug("closing the session database: %s", reason(error))


def _set_pragmas(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    # WAL: readers never wait for the writer. NORMAL: a power cut may cost the last rows, never the file.
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.close()


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))
