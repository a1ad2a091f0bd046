"""The session store: names a request's session at once, and keeps the books behind it."""

from collections.abc import Sequence

from services.gateway.sessions.bounded import RowBounds
from services.gateway.sessions.database import Database
from services.gateway.sessions.lineage import Lineage
from services.gateway.sessions.records import (
    AnswerRecord,
    CallRecord,
    ForgottenResponse,
    RequestRecord,
    ResponseRecord,
    SessionDetail,
    SessionHint,
    SessionPage,
    SessionSource,
)
from services.gateway.sessions.responses import ResponseBounds
from services.gateway.sessions.rows import Entry
from services.gateway.sessions.writer import Limits, Writer
from services.protocol.hashing import BlockHash

LONGEST_ID = 256
"""Characters of a client's id that count; whatever is behind is cut off."""
RESTORED_SESSIONS = 2048
START_SECONDS = 5.0
CLOSE_SECONDS = 2.5


class SessionStore:
    """Sessions in memory for naming, in SQLite for reading. All methods on one event loop.

    Nothing here fails a request: `resolve` and `record` neither wait nor touch a file, and whatever is wrong with the
    file costs rows only (`dropped_rows`, and a warning at most once a minute); when it can be used again, writing goes
    on by itself. Without a path, or when a newer version wrote the file, sessions are kept in memory until `close`.
    """

    def __init__(
        self,
        path: str,
        max_rows: int,
        limits: Limits | None = None,
        responses: ResponseBounds = ResponseBounds(),  # noqa: B008  a frozen value
        calls: RowBounds = RowBounds(),  # noqa: B008  a frozen value
        answers: RowBounds = RowBounds(),  # noqa: B008  a frozen value
    ) -> None:
        """`path`: the SQLite file, made with its folder where missing; empty: none. `max_rows`: requests kept, the
        oldest go first; a session goes with its last request. `responses`, `calls` and `answers`: the stored
        responses, the generated calls and the generated answers that are kept."""
        limits = limits or Limits()
        self._lineage = Lineage()
        self._database = Database(path, max_rows, responses, calls, answers, limits.busy_seconds)
        self._writer = Writer(self._database, limits, self._restore)

    async def start(self) -> None:
        """Open the database and take back the lineage of earlier sessions. Never fails; bounded by START_SECONDS."""
        await self._writer.start(START_SECONDS)

    async def close(self) -> None:
        """Write what waits, for CLOSE_SECONDS at most; what is recorded later is dropped."""
        await self._writer.close(CLOSE_SECONDS)

    async def flush(self, seconds: float) -> bool:
        """Wait until all that was recorded is written or lost; False when that takes longer than `seconds`."""
        return await self._writer.flush(seconds)

    @property
    def dropped_rows(self) -> int:
        """Requests, responses, calls and answers that could not be written since the start."""
        return self._writer.dropped

    @property
    def waiting_rows(self) -> int:
        """Rows recorded and not written yet; bounded by `Limits.queue_rows`."""
        return self._writer.waiting

    @property
    def persistent(self) -> bool:
        """Whether sessions outlive the process."""
        return self._database.persistent

    def resolve(self, hint: SessionHint, block_hashes: Sequence[BlockHash]) -> str:
        """The id of the session that a request belongs to.

        The client's word counts first: `session_id`, then the header, then `prompt_cache_key`, then
        `metadata.user_id`, then `user`. Else the prompt's lineage decides (`lineage.py` has the rule).
        `block_hashes`: the prompt's full blocks (`protocol.hashing.chain`), of any length. About 1 us a block.
        """
        for source, name in _named(hint):
            if session_id := _clean(name):
                parent = _clean(hint.parent) if source == "header" else ""
                return self._lineage.named(session_id, source, hint.opening, block_hashes, parent or None).id
        return self._lineage.infer(hint.opening, block_hashes).id

    def parent(self, session_id: str) -> str | None:
        """The session that a session of `resolve` forked from or was started by, where that is known."""
        session = self._lineage.get(session_id)
        return session.parent if session is not None else None

    def record(self, record: RequestRecord) -> None:
        """Keep a request that is over. Never waits, never raises."""
        try:
            session = self._lineage.get(record.session_id)
            self._writer.put(
                Entry(
                    record=record,
                    source=session.source if session else "lineage",
                    parent=session.parent if session else None,
                    opening=session.opening if session else b"",
                    tail=session.tail if session else b"",
                )
            )
        except Exception as error:
            self._writer.drop(1, f"a request could not be recorded: {error!r}")

    def keep_response(self, record: ResponseRecord) -> None:
        """Store a response. Never waits, never raises."""
        self._writer.put(record)

    def forget_response(self, id: str) -> None:
        """Delete a response, behind all that was stored before. Never waits, never raises."""
        self._writer.put(ForgottenResponse(id))

    async def response(self, id: str) -> ResponseRecord | None:
        """A response that is written and not pruned, or None. Raises database.SessionsUnavailable."""
        return await self._database.response(id)

    def keep_call(self, record: CallRecord) -> None:
        """Store a generated call. Never waits, never raises."""
        self._writer.put(record)

    async def calls(self, ids: Sequence[str]) -> list[CallRecord]:
        """Those of these calls that are written and not pruned. Raises database.SessionsUnavailable."""
        return await self._database.calls(ids)

    def keep_answer(self, record: AnswerRecord) -> None:
        """Store a generated answer. Never waits, never raises."""
        self._writer.put(record)

    async def answers(self, places: Sequence[bytes], calls: Sequence[str]) -> list[AnswerRecord]:
        """Those that are written and not pruned of the answers that were given at one of these places, or whose first
        call is one of these; the oldest first. Raises database.SessionsUnavailable."""
        return await self._database.answers(places, calls)

    async def sessions(self, limit: int, offset: int) -> SessionPage:
        """A page of sessions, newest first. Raises database.SessionsUnavailable."""
        data, total = await self._database.sessions(limit, offset)
        return SessionPage(
            data=data,
            total=total,
            limit=limit,
            offset=offset,
            persistent=self.persistent,
            dropped_rows=self.dropped_rows,
        )

    async def session(self, session_id: str, requests: int) -> SessionDetail | None:
        """A session with its last `requests` requests, or None. Raises database.SessionsUnavailable."""
        return await self._database.session(session_id, requests)

    async def _restore(self) -> None:
        for conversation in await self._database.conversations(RESTORED_SESSIONS):
            self._lineage.restore(conversation)


def _clean(name: str) -> str:
    """A client's id as it is kept and shown: without blanks around it, bounded, and text that UTF-8 can hold."""
    return name.encode("utf-8", "replace").decode().strip()[:LONGEST_ID].strip()


def _named(hint: SessionHint) -> tuple[tuple[SessionSource, str], ...]:
    return (
        ("session_id", hint.session_id),
        ("header", hint.header),
        ("prompt_cache_key", hint.prompt_cache_key),
        ("metadata", hint.metadata_user),
        ("user", hint.user),
    )
