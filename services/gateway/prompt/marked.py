"""Calls and answers of the history as the model wrote them, in the place of a template's own rendering.

The template renders each of them with a mark, a text that occurs nowhere else, in the place of a call's one argument,
and of an answer's thoughts and content. How it frames a call is known from a probe, how it opens an answer's turn from
the prompt that the answer went on from; so the whole is found in the text, whatever the text holds else, and is
replaced.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway.prompt.boundaries import TURN_OPENERS
from services.gateway.prompt.call_frame import CallFrame, one_argument
from services.gateway.prompt.same_call import unchanged
from services.gateway.prompt.written_answer import WrittenAnswer
from services.gateway.sessions.records import CallRecord

Part = str | Sequence[int]
"""Of a prompt: a text, or the ids that stand for one."""


@dataclass(frozen=True, slots=True)
class MarkedCall:
    record: CallRecord
    mark: str


@dataclass(frozen=True, slots=True)
class MarkedAnswer:
    place: int
    """Of its message."""
    answer: WrittenAnswer
    thoughts: str
    """A mark; so is the next."""
    content: str
    calls: Sequence[MarkedCall]


@dataclass(slots=True)
class _Writing:
    """One pass through the rendered text."""

    text: str
    at: int = 0
    """Up to here it is written."""
    parts: list[Part] = field(default_factory=list)

    def put(self, start: int, end: int, *parts: Part) -> None:
        """These stand in the place of the text from `start` to `end`."""
        self.parts += (self.text[self.at : start], *parts)
        self.at = end


@dataclass(frozen=True, slots=True)
class Marked:
    """Messages in which some calls and some answers are marks."""

    messages: Sequence[Mapping[str, Any]]
    marks: Sequence[MarkedCall | MarkedAnswer]
    """In order."""
    secret: str
    """In every mark, and nowhere else."""

    def written(self, text: str, frame: CallFrame | None) -> tuple[list[Part], set[int]] | None:
        """The rendering of `messages` with what the model wrote in it, texts and ids by turns; and the places of the
        answers that the template does not render as the model wrote them, where there are any: then the parts mean
        nothing. None where a call is not where it should be."""
        writing = _Writing(text)
        refused: set[int] = set()
        for mark in self.marks:
            if isinstance(mark, MarkedCall):
                place = _find(writing, mark, frame, writing.at)
                if place is None:
                    return None
                writing.put(*place, mark.record.raw)
            elif not _write_answer(writing, mark, frame):
                refused.add(mark.place)
        writing.put(len(text), len(text))
        parts = _merged(writing.parts)
        if not refused and any(isinstance(part, str) and self.secret in part for part in parts):
            return None
        return parts, refused


def _find(writing: _Writing, call: MarkedCall, frame: CallFrame | None, at: int) -> tuple[int, int] | None:
    if frame is None:
        return None
    framed = frame.call(call.record.name, call.mark)
    start = writing.text.find(framed, at)
    return None if start < 0 else (start, start + len(framed))


def _write_answer(writing: _Writing, mark: MarkedAnswer, frame: CallFrame | None) -> bool:
    """Whether it could be: the template shows thoughts at this place where there are some, and opens the turn as it did
    when the answer was asked for."""
    text, answer = writing.text, mark.answer
    thoughts = text.find(mark.thoughts, writing.at)
    content = text.find(mark.content, writing.at) if not answer.open else -1
    if thoughts < 0 and (answer.open or answer.thoughts):
        return False
    first, last = (thoughts, content) if thoughts >= 0 else (content, content)
    if first < 0 or (last < first and not answer.open):
        return False
    openers = (opener for opener in TURN_OPENERS if answer.lead.startswith(opener))
    start = max((text.rfind(opener, writing.at, first) for opener in openers), default=-1)
    head = text[start:first] if start >= 0 else ""
    if not head or not (answer.lead == head or (thoughts >= 0 and not answer.open and _one_opens(answer.lead, head))):
        return False
    end = first + len(mark.thoughts) if answer.open else last + len(mark.content)
    for call in mark.calls:
        place = _find(writing, call, frame, end)
        if place is None:
            return False
        end = place[1]
    writing.put(start, end, answer.lead, answer.ids, answer.rest)
    return True


def _one_opens(lead: str, head: str) -> bool:
    """The prompt closed the thoughts at once, or left opening them to the model."""
    return lead.startswith(head) or head.startswith(lead)


def _merged(parts: Sequence[Part]) -> list[Part]:
    """No two texts stand together, and none is empty."""
    merged: list[Part] = []
    for part in parts:
        if not part:
            continue
        if merged and isinstance(part, str) and isinstance(last := merged[-1], str):
            merged[-1] = last + part
        else:
            merged.append(part)
    return merged


def marked(
    messages: Sequence[Mapping[str, Any]],
    records: Mapping[str, CallRecord],
    answers: Mapping[int, WrittenAnswer],
) -> Marked:
    """Marks the calls that come back as they were read out of what the model wrote, and whole `answers`, each by the
    place of its message."""
    secret = uuid.uuid4().hex
    marks: list[MarkedCall | MarkedAnswer] = []
    count = 0

    def new_mark() -> str:
        nonlocal count
        count += 1
        return f"{secret}-{count}-"

    def with_mark(call: Mapping[str, Any]) -> Mapping[str, Any]:
        record = records.get(call.get("id", ""))
        if record is None or not unchanged(call["function"], record):
            return call
        one = MarkedCall(record, new_mark())
        marks.append(one)
        return _replaced(call, one)

    def as_marks(message: Mapping[str, Any], place: int) -> Mapping[str, Any]:
        answer = answers[place]
        inner = [MarkedCall(record, new_mark()) for record in answer.calls]
        one = MarkedAnswer(place, answer, new_mark(), new_mark(), inner)
        marks.append(one)
        message = {**message, "reasoning_content": one.thoughts}
        if not answer.open:
            message["content"] = one.content
        if one.calls:
            calls = zip(message["tool_calls"], one.calls, strict=True)
            message["tool_calls"] = [_replaced(call, mark) for call, mark in calls]
        return message

    copies: list[Mapping[str, Any]] = []
    for place, message in enumerate(messages):
        if place in answers:
            message = as_marks(message, place)
        elif "tool_calls" in message:
            message = {**message, "tool_calls": [with_mark(call) for call in message["tool_calls"]]}
        copies.append(message)
    return Marked(copies, marks, secret)


def _replaced(call: Mapping[str, Any], mark: MarkedCall) -> Mapping[str, Any]:
    return {**call, "function": one_argument(mark.record.name, mark.mark)}
