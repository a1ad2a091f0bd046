"""Finds tool calls in text that arrives in pieces. The family writes

    <tool_call>
    <function=NAME>
    <parameter=P>
    VALUE
    </parameter>
    </function>
    </tool_call>

Values are opaque: nothing in them is escaped, so a value may hold these very tags. A closing tag counts only where
the next text that is no space could follow it in a call: `</parameter>` before `<parameter=`, `</function>`,
`</tool_call>` or the end, `</function>` before `</tool_call>`, another `<tool_call>` or the end.
"""

import re
from dataclasses import dataclass, field
from typing import Literal

from services.gateway.output.held import held_back
from services.gateway.output.tool_arguments import Tools

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
_OPEN_FUNCTION, _CLOSE_FUNCTION = "<function=", "</function>"
_OPEN_PARAMETER, _CLOSE_PARAMETER = "<parameter=", "</parameter>"

_OPENINGS = (OPEN_CALL, _OPEN_FUNCTION)
_OPENING = re.compile("|".join(_OPENINGS))
_SPACE = re.compile(r"\s*")
_NAME_CHARS = 256
_NAME = re.compile(rf"[^<>\n]{{1,{_NAME_CHARS}}}")

_Verdict = Literal["yes", "no", "wait"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    parameters: dict[str, str]
    """As the model wrote them, without the newline at each side."""


class ToolCalls:
    """Text in; text without the calls, and the calls, out: the same whatever the cut.

    What has the form of a call but is none stays text. White space around calls belongs to them. A call without its
    `<tool_call>` is one if it names a tool that is declared.
    """

    __slots__ = ("_after_call", "_call", "_held", "_tools")

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._held = ""
        """Not given out yet; while a call is open: the white space in front of it, and the call."""
        self._call: _OpenCall | None = None
        self._after_call = False
        """Nothing but white space came since the last call."""

    def feed(self, text: str) -> list[str | ToolCall]:
        self._held += text
        return self._run(ended=False)

    def finish(self, complete: bool) -> list[str | ToolCall]:
        """The rest, at the end of the answer. `complete`: the model ended it itself; if not, a call that is still open
        is dropped, for its values may be cut."""
        if self._call is not None and not complete:
            return []
        return self._run(ended=True)

    def _run(self, ended: bool) -> list[str | ToolCall]:
        out: list[str | ToolCall] = []
        while self._call is not None or self._open(out, ended):
            assert self._call is not None
            verdict = self._call.read(self._held, ended)
            if verdict == "wait":
                return out
            if verdict == "yes":
                out.append(ToolCall(self._call.name, self._call.parameters))
                self._held = self._held[self._call.at :]
                self._after_call = True
            else:
                self._text(self._call.opening_end, out)
            self._call = None
        return out

    def _open(self, out: list[str | ToolCall], ended: bool) -> bool:
        """Give out the text up to the next opening tag, which becomes the open call; False when there is none."""
        opening = _OPENING.search(self._held)
        if opening is not None:
            self._text(len(self._held[: opening.start()].rstrip()), out)
            start = len(self._held) - len(self._held.lstrip())
            self._call = _OpenCall(self._tools, start, start + len(opening[0]), opening[0] == OPEN_CALL)
            return True
        free = len(self._held)
        if not ended:
            free = len(self._held[: free - held_back(self._held, _OPENINGS)].rstrip())
        self._text(free, out)
        return False

    def _text(self, length: int, out: list[str | ToolCall]) -> None:
        """Give out so much of what is held."""
        text, self._held = self._held[:length], self._held[length:]
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            out.append(text)


@dataclass(slots=True)
class _OpenCall:
    """How far one call is read. All places are in the text that the caller holds, which only grows meanwhile; nothing
    is read twice."""

    tools: Tools
    at: int
    """All before is read; at the end: where the call ends."""
    opening_end: int
    """Where the opening tag ends: what is given out as text if this is no call."""
    tagged: bool
    """It began with `<tool_call>`."""
    name: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    _parameter: str = ""
    _scan: int = 0
    """No closing tag of the open parameter begins before."""

    def read(self, text: str, ended: bool) -> _Verdict:
        """`yes`: whole, up to `at`. `no`: not a call. `wait`: more text is needed, and only if it has not `ended`."""
        while True:
            if not self.name:
                verdict = self._head(text)
            elif self._parameter:
                verdict = self._value(text, ended)
            else:
                done = self._ends(text, ended)
                if done != "no":
                    return "no" if done == "wait" and ended else done
                verdict = self._next_parameter(text)
            if verdict != "yes":
                return "no" if ended else verdict

    def _head(self, text: str) -> _Verdict:
        at = _skip(text, self.opening_end) if self.tagged else self.at
        verdict, name, at = _tag(text, at, _OPEN_FUNCTION)
        if verdict == "yes":
            if not self.tagged and name not in self.tools:
                return "no"
            self.name, self.at = name, at
        return verdict

    def _next_parameter(self, text: str) -> _Verdict:
        verdict, name, at = _tag(text, _skip(text, self.at), _OPEN_PARAMETER)
        if verdict == "yes":
            self._parameter, self.at, self._scan = name, at, at
        return verdict

    def _value(self, text: str, ended: bool) -> _Verdict:
        while (place := text.find(_CLOSE_PARAMETER, self._scan)) >= 0:
            behind = place + len(_CLOSE_PARAMETER)
            verdict = _either(_starts(text, behind, _OPEN_PARAMETER, ended), _call_ends(text, behind, ended)[0])
            if verdict == "yes":
                self.parameters[self._parameter] = text[self.at : place].removeprefix("\n").removesuffix("\n")
                self._parameter, self.at = "", behind
                return "yes"
            if verdict == "wait":
                self._scan = place
                return "wait"
            self._scan = place + 1
        self._scan = max(self._scan, len(text) - len(_CLOSE_PARAMETER) + 1)
        return "wait"

    def _ends(self, text: str, ended: bool) -> _Verdict:
        """Whether nothing but the call's end comes here."""
        if ended and not self.parameters and _skip(text, self.at) == len(text):
            return "no"  # a head alone says too little to act on
        verdict, at = _call_ends(text, self.at, ended)
        if verdict == "yes":
            self.at = at
        return verdict


def _skip(text: str, at: int) -> int:
    """Behind white space."""
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _starts(text: str, at: int, tag: str, ended: bool) -> _Verdict:
    """Whether the next text that is no space is `tag`."""
    at = _skip(text, at)
    if text.startswith(tag, at):
        return "yes"
    return "wait" if not ended and tag.startswith(text[at : at + len(tag)]) else "no"


def _either(*verdicts: _Verdict) -> _Verdict:
    return "yes" if "yes" in verdicts else "wait" if "wait" in verdicts else "no"


def _behind(text: str, at: int, tag: str) -> int:
    """The place behind the tag that `_starts` has found."""
    return _skip(text, at) + len(tag)


def _call_ends(text: str, at: int, ended: bool) -> tuple[_Verdict, int]:
    """Whether here, behind a parameter or a function's head, the call ends; and where."""
    if ended and _skip(text, at) == len(text):
        return "yes", len(text)
    closed, function = _starts(text, at, CLOSE_CALL, ended), _starts(text, at, _CLOSE_FUNCTION, ended)
    if closed == "yes":
        return "yes", _behind(text, at, CLOSE_CALL)
    if function != "yes":
        return _either(closed, function), at
    at = _behind(text, at, _CLOSE_FUNCTION)
    if ended and _skip(text, at) == len(text):
        return "yes", len(text)
    closed, another = _starts(text, at, CLOSE_CALL, ended), _starts(text, at, OPEN_CALL, ended)
    if closed == "yes":
        return "yes", _behind(text, at, CLOSE_CALL)
    return _either(closed, another), at


def _tag(text: str, at: int, opening: str) -> tuple[_Verdict, str, int]:
    """Reads `<opening=NAME>`: the name, and the place behind it."""
    if not text.startswith(opening, at):
        return ("wait" if opening.startswith(text[at : at + len(opening)]) else "no"), "", at
    name = _NAME.match(text, at + len(opening))
    end = name.end() if name else at + len(opening)
    if end == len(text) and end - at - len(opening) < _NAME_CHARS:
        return "wait", "", at
    if name is None or text[end : end + 1] != ">" or not name[0].strip():
        return "no", "", at
    return "yes", name[0].strip(), end + 1
