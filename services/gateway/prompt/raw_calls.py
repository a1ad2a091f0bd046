"""Calls of the history as the model wrote them, in the place of a template's own rendering.

The template renders each such call with one argument that occurs nowhere else, a mark. How it frames name and mark is
known from a probe, so the whole call is found in the text, whatever the text holds else, and is replaced.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.output.structure import CLOSE_CALL, OPEN_CALL
from services.gateway.sessions.records import CallRecord

_NAME, _MARK = "a-probed-function", "a-probed-argument"


def _function(name: str, mark: str) -> dict[str, Any]:
    return {"name": name, "arguments": {"raw": mark}}


PROBE: Sequence[Mapping[str, Any]] = (
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_0", "type": "function", "function": _function(_NAME, _MARK)}],
    },
    {"role": "tool", "content": "b", "tool_call_id": "call_0"},
)
"""Its rendering is for `CallFrame.of`."""


@dataclass(frozen=True, slots=True)
class CallFrame:
    """What a template writes around the name of a call and around its one argument."""

    head: str
    middle: str
    tail: str

    @classmethod
    def of(cls, probe: str) -> "CallFrame | None":
        """None where the probe's call does not stand, once, between the tags of calls."""
        before, _, behind = probe.partition(_MARK)
        start, end = before.rfind(OPEN_CALL), behind.find(CLOSE_CALL)
        if start < 0 or end < 0 or _MARK in behind:
            return None
        head, name, middle = before[start:].partition(_NAME)
        if not name or _NAME in middle:
            return None
        return cls(head, middle, behind[: end + len(CLOSE_CALL)])

    def call(self, name: str, mark: str) -> str:
        return self.head + name + self.middle + mark + self.tail


@dataclass(frozen=True, slots=True)
class MarkedCall:
    name: str
    mark: str
    raw: str


@dataclass(frozen=True, slots=True)
class Marked:
    """Messages in which some calls have a mark as their only argument."""

    messages: Sequence[Mapping[str, Any]]
    calls: Sequence[MarkedCall]
    """In order."""
    secret: str
    """In every mark, and nowhere else."""

    def written(self, text: str, frame: CallFrame) -> str | None:
        """The rendering of `messages` with the raw calls in it; None where a mark is not where it should be."""
        parts: list[str] = []
        at = 0
        for call in self.calls:
            framed = frame.call(call.name, call.mark)
            place = text.find(framed, at)
            if place < 0:
                return None
            parts += (text[at:place], call.raw)
            at = place + len(framed)
        whole = "".join((*parts, text[at:]))
        return None if self.secret in whole else whole


def marked(messages: Sequence[Mapping[str, Any]], records: Mapping[str, CallRecord]) -> Marked:
    """Marks the calls that come back as they were read out of what the model wrote."""
    secret = uuid.uuid4().hex
    found: list[MarkedCall] = []

    def with_mark(call: Mapping[str, Any]) -> Mapping[str, Any]:
        record = records.get(call.get("id", ""))
        if record is None or not _unchanged(call["function"], record):
            return call
        found.append(MarkedCall(record.name, f"{secret}-{len(found)}", record.raw))
        return {**call, "function": _function(record.name, found[-1].mark)}

    copies = [
        {**message, "tool_calls": [with_mark(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]
    return Marked(copies, found, secret)


def _unchanged(function: Mapping[str, Any], record: CallRecord) -> bool:
    if function["name"] != record.name:
        return False
    try:
        return same_json(function["arguments"], json.loads(record.arguments))
    except (ValueError, RecursionError):  # as deep as JSON can be written, and too deep to be read
        return False


def same_json(one: Any, other: Any) -> bool:
    """Whether two values are the same in JSON: 1 is 1.0 and not true, the order of an object's keys says nothing."""
    pairs = [(one, other)]
    while pairs:
        a, b = pairs.pop()
        if isinstance(a, dict) and isinstance(b, dict):
            if a.keys() != b.keys():
                return False
            pairs += ((a[key], b[key]) for key in a)
        elif isinstance(a, list) and isinstance(b, list):
            if len(a) != len(b):
                return False
            pairs += zip(a, b, strict=True)
        elif isinstance(a, bool) is not isinstance(b, bool) or a != b:
            return False
    return True
