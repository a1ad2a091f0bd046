"""The tool calls that models wrote here, found again by their ids when a client sends them back.

Clients send a call's arguments as JSON of their own: other spaces, another order. Rendered from that, the call would be
other tokens than those that were generated, and everything behind it would miss the cache. Nothing here can fail an
answer: a call that cannot be found is rendered as any other.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.sessions.database import SessionsUnavailable
from services.gateway.sessions.records import CallRecord
from services.gateway.sessions.store import SessionStore

log = logging.getLogger(__name__)

RECENT_BYTES = 2 * 2**20
"""Of the calls in memory: those that running turns wrote a moment ago, perhaps not in the database yet."""


class CallMemory:
    """The calls used last are in memory, all up to their bound in the session database. On the event loop's thread."""

    def __init__(self, sessions: SessionStore, recent_bytes: int = RECENT_BYTES) -> None:
        self._sessions = sessions
        self._recent_bytes = recent_bytes
        self._recent: OrderedDict[str, CallRecord] = OrderedDict()
        self._bytes = 0

    def keep(self, record: CallRecord) -> None:
        """Never waits, never raises."""
        self._remember(record)
        self._sessions.keep_call(record)

    async def of(self, messages: Sequence[Mapping[str, Any]], language: str) -> dict[str, CallRecord]:
        """The calls in these messages that a model of this `CallRecord.language` wrote, by id. What they say may have
        been changed since."""
        ids = {call["id"] for message in messages for call in message.get("tool_calls", ()) if "id" in call}
        found = {id: self._recent[id] for id in ids if id in self._recent}
        for id in found:
            self._recent.move_to_end(id)
        if unknown := [id for id in ids if id not in found]:
            try:
                written = await self._sessions.calls(unknown)
            except SessionsUnavailable as error:
                log.debug("calls of the history are rendered anew: %s", error)
                written = []
            for record in written:
                found[record.id] = record
                self._remember(record)
        return {id: record for id, record in found.items() if record.language == language}

    def _remember(self, record: CallRecord) -> None:
        if record.id in self._recent:  # two requests have read it at once
            return
        self._recent[record.id] = record
        self._bytes += record.size
        while self._bytes > self._recent_bytes:
            self._bytes -= self._recent.popitem(last=False)[1].size
