"""What a model wrote for a message of the history, so that the prompt has its very tokens.

Clients trim texts, wrap them anew and leave thoughts out, and a tokenizer does not always give back the tokens that a
model chose. So an answer is remembered as its ids, and found for a message that says the same. What the client sends
decides: thoughts that it left out are put back, but no other text than its own ever gets into the prompt.
"""

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from services.gateway.output.thoughts import CLOSE, OPEN
from services.gateway.output.token_bytes import TokenBytes
from services.gateway.prompt.same_call import unchanged
from services.gateway.sessions.records import AnswerRecord, CallRecord
from services.protocol.generate import unpack_ids

_utf8 = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """What stands in the prompt for one message of the assistant's."""

    lead: str
    """From the token that opens the turn to where the model went on."""
    ids: Sequence[int]
    rest: str
    """What the message has behind `ids`: some of a token's text."""
    thoughts: bool
    """There are some in `ids`."""
    open: bool
    """It broke off among the thoughts: the template closes them."""
    calls: tuple[CallRecord, ...] = ()
    """Those within `ids`."""


def content_digest(text: str) -> bytes:
    """Without the white space around it; empty where there is nothing else."""
    text = text.strip()
    return blake2b(text.encode("utf-8", "replace"), digest_size=16).digest() if text else b""


def thoughts_digest(text: str) -> bytes:
    """Of the words alone: clients wrap thoughts anew."""
    return content_digest(" ".join(text.split()))


def written_answer(
    message: Mapping[str, Any],
    records: Sequence[AnswerRecord],
    calls: Mapping[str, CallRecord],
    token_bytes: TokenBytes,
) -> WrittenAnswer | None:
    """`message`: of the assistant's, as templates know it. `records`: answers that it may be, the oldest first. None
    where it is none of them."""
    for record in reversed(records):
        if (whole := _whole(message, record, calls)) is not None:
            return whole
    parts = [part for record in reversed(records) if (part := _part(message, record, token_bytes)) is not None]
    return max(parts, key=lambda part: len(part.ids), default=None)


def _whole(message: Mapping[str, Any], record: AnswerRecord, known: Mapping[str, CallRecord]) -> WrittenAnswer | None:
    sent = message.get("tool_calls", ())
    if not record.whole or tuple(call.get("id", "") for call in sent) != record.calls:
        return None
    if content_digest(message["content"]) != record.content:
        return None
    if thoughts_digest(message.get("reasoning_content", "")) not in (b"", record.thoughts):
        return None
    calls = tuple(known[id] for id in record.calls if id in known)
    if len(calls) < len(record.calls):
        return None
    if not all(unchanged(call["function"], read) for call, read in zip(sent, calls, strict=True)):
        return None
    return WrittenAnswer(record.lead, unpack_ids(record.ids), "", bool(record.thoughts), False, calls)


def _part(message: Mapping[str, Any], record: AnswerRecord, token_bytes: TokenBytes) -> WrittenAnswer | None:
    """Of an answer that broke off, or that the client has cut. Reads all out of the ids: of an answer under way more
    may have come than was heard."""
    if message.get("tool_calls"):
        return None
    ids = unpack_ids(record.ids)
    text = _Text(ids, token_bytes)
    thoughts = _Thoughts.of(text.whole, record.thinking)
    thought = thoughts_digest(text.whole[thoughts.start : thoughts.end]) if thoughts is not None else b""
    reasoning = message.get("reasoning_content", "")
    if thoughts is not None and not message["content"] and reasoning.strip():
        end = _end_of(reasoning, text.whole, thoughts.start, thoughts.end)
        if end is not None and not (thoughts.closed and thoughts_digest(reasoning) == thought):
            taken, rest = text.until(end)
            return WrittenAnswer(record.lead, ids[:taken], rest, True, True)
    if thoughts is not None and not thoughts.closed:
        return None
    if thoughts_digest(reasoning) not in (b"", thought):
        return None
    end = _end_of(message["content"], text.whole, thoughts.answer if thoughts is not None else 0, len(text.whole))
    if end is None:
        return None
    taken, rest = text.until(end)
    return WrittenAnswer(record.lead, ids[:taken], rest, bool(thought), False)


def _end_of(sent: str, text: str, start: int, end: int) -> int | None:
    """Where `sent` ends if it stands at `start`; white space around it may be missing."""
    if text.startswith(sent, start) and start + len(sent) <= end:
        return start + len(sent)
    sent = sent.strip()
    while start < end and text[start].isspace():
        start += 1
    return start + len(sent) if text.startswith(sent, start) and start + len(sent) <= end else None


@dataclass(frozen=True, slots=True)
class _Thoughts:
    """Where they stand in an answer's text, as `output.thoughts` reads it."""

    start: int
    end: int
    answer: int
    """Where what follows them begins."""
    closed: bool

    @classmethod
    def of(cls, text: str, inside: bool) -> "_Thoughts | None":
        start = 0
        if not inside:
            start = len(text) - len(text.lstrip())
            if not text.startswith(OPEN, start):
                return None
            start += len(OPEN)
        start += text.startswith("\n", start)
        end = text.find(CLOSE, start)
        if end < 0:
            return cls(start, len(text), len(text), False)
        answer = end + len(CLOSE)
        for _ in range(2):
            answer += text.startswith("\n", answer)
        return cls(start, end, answer, True)


class _Text:
    """What ids spell, as a client reads it, and where each of them ends in it."""

    def __init__(self, ids: Sequence[int], token_bytes: TokenBytes) -> None:
        decoder = _utf8("replace")
        texts: list[str] = []
        self._ends: list[int] = []
        """Of each token; -1 within a character."""
        end = 0
        for id in ids:
            texts.append(decoder.decode(token_bytes[id]))
            end += len(texts[-1])
            self._ends.append(-1 if decoder.getstate()[0] else end)
        texts.append(decoder.decode(b"", True))
        self.whole = "".join(texts)

    def until(self, end: int) -> tuple[int, str]:
        """How many tokens stand before a place, and the text between the last of them and the place."""
        for count in range(len(self._ends), 0, -1):
            if 0 <= self._ends[count - 1] <= end:
                return count, self.whole[self._ends[count - 1] : end]
        return 0, self.whole[:end]
