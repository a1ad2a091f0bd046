"""Stored responses: what `previous_response_id`, GET and DELETE find.

The newest are also in memory, since a client may go on from a response before it is written. A response holds the items
of its own request only; those before are found along its chain. Nothing here can fail an answer: a database that cannot
be used costs stored responses, and is told only to who asks for one that is not in memory.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from services.gateway.errors import ApiError
from services.gateway.sessions.database import SessionsUnavailable
from services.gateway.sessions.records import ResponseRecord
from services.gateway.sessions.store import SessionStore

RECENT_BYTES = 32 * 2**20
"""Of the responses in memory, their inputs included."""
DELETED = 4096
"""Deleted responses that are remembered, so that none is found while its row waits to be deleted."""


@dataclass(frozen=True, slots=True)
class History:
    """The conversation up to and with one response."""

    chain: str
    """`ResponseRecord.chain`; empty where there is no history."""
    items: Sequence[dict[str, Any]]
    """Input and output items, in order."""


NO_HISTORY = History("", ())


class _Output(Struct, frozen=True):
    output: list[dict[str, Any]]


_items = msgspec.json.Decoder(list[dict[str, Any]]).decode
_output = msgspec.json.Decoder(_Output).decode


class ResponseStore:
    """On the event loop's thread."""

    def __init__(self, sessions: SessionStore, recent_bytes: int = RECENT_BYTES) -> None:
        self._sessions = sessions
        self._recent_bytes = recent_bytes
        self._recent: OrderedDict[str, ResponseRecord] = OrderedDict()
        self._bytes = 0
        self._deleted: OrderedDict[str, None] = OrderedDict()

    def keep(self, record: ResponseRecord) -> None:
        """Never waits, never raises."""
        self._recent[record.id] = record
        self._bytes += record.size
        while self._bytes > self._recent_bytes:
            self._bytes -= self._recent.popitem(last=False)[1].size
        self._sessions.keep_response(record)

    async def get(self, id: str) -> ResponseRecord:
        """Raises ApiError: 404 for one that is unknown, deleted or pruned, 503 where that cannot be found out."""
        record = await self._find(id)
        if record is None:
            raise _unknown(f"There is no response `{id}` (any more).", "response_id", "response_not_found")
        return record

    async def history(self, id: str) -> History:
        """Raises ApiError as `get` does."""
        record = await self._find(id)
        if record is None:
            raise _previous_unknown(f"There is no response `{id}` (any more)")
        before = await self._inputs(record)
        return History(record.chain, [*before, *_output(record.response).output])

    async def inputs(self, id: str) -> list[dict[str, Any]]:
        """All input items that a response answers, those of its history included. Raises ApiError as `get` does."""
        return await self._inputs(await self.get(id))

    async def delete(self, id: str) -> None:
        """Also ends the chains that go on from it. Raises ApiError as `get` does."""
        await self.get(id)
        record = self._recent.pop(id, None)
        self._bytes -= record.size if record is not None else 0
        self._deleted[id] = None
        if len(self._deleted) > DELETED:
            self._deleted.popitem(last=False)
        self._sessions.forget_response(id)

    async def _inputs(self, record: ResponseRecord) -> list[dict[str, Any]]:
        chain = [_items(record.items)]
        while record.previous is not None:
            before = await self._find(record.previous)
            if before is None:
                raise _previous_unknown(f"The response `{record.previous}`, an earlier one of this chain, is gone")
            record = before
            chain.append([*_items(record.items), *_output(record.response).output])
        return [item for items in reversed(chain) for item in items]

    async def _find(self, id: str) -> ResponseRecord | None:
        if id in self._deleted:
            return None
        if id in self._recent:
            self._recent.move_to_end(id)
            return self._recent[id]
        try:
            return await self._sessions.response(id)
        except SessionsUnavailable as error:
            raise ApiError(503, "server_error", str(error), code="responses_unavailable", retry_after=5.0) from error


def _previous_unknown(what: str) -> ApiError:
    message = f"{what}; send the whole conversation as `input`."
    return _unknown(message, "previous_response_id", "previous_response_not_found")


def _unknown(message: str, param: str, code: str) -> ApiError:
    return ApiError(404, "invalid_request_error", message, code=code, param=param)
