"""A tool call in the form of other families: `<tool_call>{"name": NAME, "arguments": {...}}</tool_call>`."""

import re

from services.gateway.output.call_part import CallPart
from services.gateway.output.structure import CLOSE_CALL, END, OPEN_CALL, Verdict, follows, skip_space
from services.gateway.output.tool_arguments import Tools, json_object, value_json

_MARK = re.compile(r'["{}]')
_STRING_MARK = re.compile(r'["\\]')
_REST_OF_LINE = re.compile(r"[^\S\n]*")
_ARGUMENTS = ("arguments", "parameters")


class JsonCall:
    """How far one such call is read; `text` begins with its `<tool_call>` and only grows meanwhile. It is a call when
    it names a declared tool and nothing else stands on its last line; until then nothing of it is given."""

    committed = False
    stray = ""

    __slots__ = ("_depth", "_in_string", "_part", "_scan", "_tools", "at", "text")

    def __init__(self, tools: Tools, text: str) -> None:
        self.text = text
        self.at = 0
        """At the end: where the call ends."""
        self._tools = tools
        self._scan = len(OPEN_CALL)
        self._depth = 0
        self._in_string = False
        self._part: CallPart | None = None

    @property
    def raw(self) -> str:
        return self.text[: self.at]

    def take(self) -> CallPart | None:
        """The call, once, when it has been read."""
        part, self._part = self._part, None
        return part

    def read(self, ended: bool) -> Verdict:
        """`yes`: whole, up to `at`. `no`: not a call. `wait`: more text is needed, and only if it has not `ended`."""
        if not self.at and not self._object_ends():
            return "no" if ended else "wait"
        verdict = self._closes(ended)
        if verdict == "yes":
            found = _name_and_arguments(self.text[skip_space(self.text, len(OPEN_CALL)) : self._scan])
            if found is None or found[0] not in self._tools:
                return "no"
            name, arguments = found
            self._part = CallPart(arguments, name, done=True, raw=self.raw)
        return verdict

    def _object_ends(self) -> bool:
        """Whether the object is whole; its end is then both `_scan` and `at`. No character is read twice."""
        text, at = self.text, self._scan
        while (mark := (_STRING_MARK if self._in_string else _MARK).search(text, at)) is not None:
            at = mark.end()
            if mark[0] == '"':
                self._in_string = not self._in_string
            elif mark[0] == "\\":
                if at == len(text):  # what it escapes is still to come
                    self._scan = mark.start()
                    return False
                at += 1
            else:
                self._depth += 1 if mark[0] == "{" else -1
                if self._depth == 0:
                    self._scan = self.at = at
                    return True
        self._scan = len(text)
        return False

    def _closes(self, ended: bool) -> Verdict:
        chains = (((CLOSE_CALL,), ()), ((), (OPEN_CALL,)), ((), (END,)))
        verdict, behind = follows(self.text, self._scan, chains, ended)
        if verdict != "yes":
            return verdict
        rest = _REST_OF_LINE.match(self.text, behind)
        end = rest.end() if rest else behind
        if end == len(self.text):
            verdict = "yes" if ended else "wait"
        elif self.text[end] != "\n" and not self.text.startswith("<", end):
            verdict = "no"
        self.at = behind
        return verdict


def _name_and_arguments(text: str) -> tuple[str, str] | None:
    """The arguments as JSON, whether they are written as an object or as a string that holds one."""
    call = json_object(text)
    if call is None or not isinstance(call.get("name"), str):
        return None
    given = next((call[key] for key in _ARGUMENTS if key in call), None)
    if isinstance(given, str):
        given = json_object(given)
    arguments = value_json(given) if isinstance(given, dict) else None
    return None if arguments is None else (call["name"], arguments)
