"""The answers that models gave here, found again by where in a conversation they were given.

Where that is, is told by what stands before: so a message is taken for an answer only where the very same conversation
was asked, within the same `cache_salt`. An answer that called tools is also found by its first call's id, which no
other has. Nothing here can fail an answer: one that cannot be found is rendered as any other message.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any
from weakref import WeakSet

from services.gateway.output.heard_answer import HeardAnswer
from services.gateway.sessions.database import SessionsUnavailable
from services.gateway.sessions.records import AnswerRecord
from services.gateway.sessions.store import SessionStore

log = logging.getLogger(__name__)

RECENT_BYTES = 8 * 2**20
"""Of the answers in memory: those that running turns gave a moment ago, perhaps not in the database yet."""
_ROW_BYTES = 512
"""That a record takes beside its ids."""


def places(messages: Sequence[Mapping[str, Any]], salt: str, language: str) -> dict[int, bytes]:
    """A digest of all that stands before each message of the assistant's, by the message's place, and before the
    answer that is asked for, by the number of messages. Thoughts do not count, which clients drop, nor does white space
    around contents, nor what a call says (4 ms for 4 MB)."""
    found: dict[int, bytes] = {}
    digest = blake2b(digest_size=16, person=b"samovar-place")

    def add(text: str) -> None:
        data = text.encode("utf-8", "replace")
        digest.update(len(data).to_bytes(8, "little") + data)

    add(salt)
    add(language)
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            found[place] = digest.copy().digest()
        add(message["role"])
        add(message["content"].strip())
        for call in message.get("tool_calls", ()):
            add(call.get("id") or call["function"]["name"])
    found[len(messages)] = digest.digest()
    return found


class AnswerMemory:
    """The answers used last and those under way are in memory, all up to their bound in the session database. On the
    event loop's thread."""

    def __init__(self, sessions: SessionStore, recent_bytes: int = RECENT_BYTES) -> None:
        self._sessions = sessions
        self._recent_bytes = recent_bytes
        self._recent: OrderedDict[str, AnswerRecord] = OrderedDict()
        self._ids: dict[bytes | str, set[str]] = {}
        """Of those in memory, by place and by first call."""
        self._bytes = 0
        self._open: WeakSet[HeardAnswer] = WeakSet()

    def follow(self, answer: HeardAnswer) -> None:
        """An answer has begun: what of it there is can be found from now on, since a client may leave and come back
        before an engine has said its last word."""
        self._open.add(answer)

    def keep(self, record: AnswerRecord) -> None:
        """It is over. Never waits, never raises."""
        if record.ids:
            self._remember(record)
            self._sessions.keep_answer(record)

    async def of(
        self, messages: Sequence[Mapping[str, Any]], places: Mapping[int, bytes], language: str
    ) -> dict[int, list[AnswerRecord]]:
        """What a model of this `AnswerRecord.language` may have written for which message, by its place among
        `messages`; the oldest first."""
        keys = {
            place: (before, _first_call(messages[place])) for place, before in places.items() if place < len(messages)
        }
        known: dict[str, AnswerRecord] = {}
        unknown_places: list[bytes] = []
        unknown_calls: list[str] = []
        for before, call in keys.values():
            ids = self._ids.get(before, set()) | (self._ids.get(call, set()) if call else set())
            for id in ids:
                known[id] = self._recent[id]
                self._recent.move_to_end(id)
            if not ids:
                unknown_places.append(before)
                unknown_calls += [call] if call else []
        if unknown_places:
            try:
                written = await self._sessions.answers(unknown_places, unknown_calls)
            except SessionsUnavailable as error:
                log.debug("answers of the history are rendered anew: %s", error)
                written = []
            for record in written:
                known[record.id] = record
                self._remember(record)
        wanted = {key for pair in keys.values() for key in pair}
        known.update(
            (answer.id, answer.record()) for answer in self._open if not answer.over and answer.place in wanted
        )
        by_key: dict[bytes | str, dict[str, AnswerRecord]] = {}
        for record in known.values():
            if record.language == language:
                for key in _keys(record):
                    by_key.setdefault(key, {})[record.id] = record
        found = {place: by_key.get(before, {}) | by_key.get(call, {}) for place, (before, call) in keys.items()}
        return {place: list(records.values()) for place, records in found.items() if records}

    def _remember(self, record: AnswerRecord) -> None:
        if record.id in self._recent:  # two requests have read it at once
            return
        self._recent[record.id] = record
        for key in _keys(record):
            self._ids.setdefault(key, set()).add(record.id)
        self._bytes += record.size + _ROW_BYTES
        while self._bytes > self._recent_bytes:
            id, oldest = self._recent.popitem(last=False)
            self._bytes -= oldest.size + _ROW_BYTES
            for key in _keys(oldest):
                self._ids[key].discard(id)
                if not self._ids[key]:
                    del self._ids[key]


def _keys(record: AnswerRecord) -> Sequence[bytes | str]:
    return (record.place, *record.calls[:1])


def _first_call(message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls", ())
    return calls[0].get("id", "") if calls else ""
