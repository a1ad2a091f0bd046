"""A tool call in the family's own form, read while it is written."""

import re
from typing import Literal

from services.gateway.output.call_part import CallPart
from services.gateway.output.held import unfinished_tag
from services.gateway.output.structure import (
    CALL_ENDS,
    CLOSE_CALL,
    CLOSE_FUNCTION,
    CLOSE_PARAMETER,
    OPEN_CALL,
    OPEN_FUNCTION,
    OPEN_PARAMETER,
    PARAMETER_ENDS,
    VALUE_BREAKS_OFF,
    Verdict,
    follows,
    named_tag,
    skip_space,
)
from services.gateway.output.tool_arguments import Parameter, Tools, json_object, to_json, value_json

_IN_VALUE = (CLOSE_PARAMETER, CLOSE_FUNCTION, CLOSE_CALL, OPEN_PARAMETER)
_ENDING = re.compile("|".join(_IN_VALUE))

Names = Literal["any", "declared", "none"]
"""Which names may be called."""


class OpenCall:
    """How far one call is read; `text` begins with its opening tag.

    With `live` the call is given out from its head on, which cannot be taken back: from there on it is `committed` and
    whatever comes belongs to it, until it ends. Without, nothing is given before all is known to be a call.

    The arguments are written as JSON while they are read: a value that is a string by its schema character by
    character, but for what may belong to a closing tag and one newline in front of it; any other when it is whole.
    """

    __slots__ = (
        "_announced",
        "_begun",
        "_closed",
        "_given",
        "_live",
        "_name",
        "_names",
        "_open",
        "_parameter",
        "_raw",
        "_scan",
        "_stray",
        "_string",
        "_tagged",
        "_tools",
        "_written",
        "at",
        "committed",
        "text",
    )

    def __init__(self, tools: Tools, text: str, *, names: Names, live: bool) -> None:
        self.text = text
        self.at = 0
        """All before is read; at the end: where the call ends. A committed call forgets the text that is read."""
        self.committed = False
        self._tools = tools
        self._tagged = text.startswith(OPEN_CALL)
        self._names = names
        self._live = live
        self._name = ""
        """Set once the head is read."""
        self._open: str | None = None
        """Whose value is being read."""
        self._parameter = Parameter(frozenset())
        self._announced = False
        """A part with the name has been taken."""
        self._begun = False
        """Some of the open value is read."""
        self._string = False
        """The open value is a string, and some of it may be written."""
        self._scan = 0
        """No tag that ends the open value begins before."""
        self._given: list[str] = []
        """The parameters so far."""
        self._closed = False
        self._written: list[str] = []
        self._raw: list[str] = []
        self._stray: list[str] = []

    @property
    def raw(self) -> str:
        """The text of the call as far as it is read, without white space at the end."""
        return ("".join(self._raw) + self.text[: self.at]).rstrip()

    @property
    def stray(self) -> str:
        """What stood between the parameters of a committed call and belongs to none."""
        return "".join(self._stray).strip()

    def take(self) -> CallPart | None:
        """What was read since the last time, of a call that is committed or whole."""
        if self._announced and not self._written:
            return None
        name = "" if self._announced else self._name
        self._announced = True
        arguments = "".join(self._written)
        self._written.clear()
        return CallPart(arguments, name, self._closed, self.raw if self._closed else "")

    def read(self, ended: bool) -> Verdict:
        """`yes`: whole, up to `at`. `no`: not a call, and never so once it is committed. `wait`: more text is needed,
        and only if it has not `ended`."""
        verdict: Verdict = "yes"
        while verdict == "yes" and not self._closed:
            if not self._name:
                verdict = self._head()
            elif self._open is not None:
                verdict = self._value(ended)
            else:
                verdict = self._between(ended)
        if self.committed and not self._closed:
            self._forget()
        return "no" if ended and verdict == "wait" else verdict

    def _head(self) -> Verdict:
        at = skip_space(self.text, len(OPEN_CALL)) if self._tagged else 0
        verdict, name, at = named_tag(self.text, at, OPEN_FUNCTION)
        if verdict == "yes":
            if self._names == "none" or (self._names == "declared" and name not in self._tools):
                return "no"
            self._name, self.at, self.committed = name, at, self._live
        return verdict

    def _between(self, ended: bool) -> Verdict:
        """Behind the head or a parameter: another parameter, or the end of the call."""
        text = self.text
        verdict, behind = follows(text, self.at, CALL_ENDS, ended)
        if verdict == "wait":
            return verdict
        at = skip_space(text, self.at)
        if verdict == "yes":
            if ended and at == len(text) and not self._given and not self.committed:
                return "no"  # a head alone says too little to act on
            self._close(behind)
            return verdict
        verdict, name, behind = named_tag(text, at, OPEN_PARAMETER)
        if verdict == "yes":
            self._begin_value(name, behind)
        elif self.committed and (verdict == "no" or ended):
            if text.startswith(CLOSE_FUNCTION, at):
                self._close(at + len(CLOSE_FUNCTION))
                return "yes"
            end = text.find("<", at + 1)
            end = end if end >= 0 else len(text)
            self._stray.append(text[self.at : end])
            self.at = end
            return "yes"
        return verdict

    def _begin_value(self, name: str, at: int) -> None:
        self._open, self.at, self._scan = name, at, at
        self._parameter = self._tools.parameter(self._name, name)
        self._begun = self._string = False
        self._written.append(("{" if not self._given else ", ") + to_json(name) + ": ")
        self._given.append(name)

    def _value(self, ended: bool) -> Verdict:
        if not self._begun:
            if self.at == len(self.text) and not ended:
                return "wait"
            if self.text.startswith("\n", self.at):
                self.at += 1
            self._scan = max(self._scan, self.at)
            self._begun = True
        text = self.text
        while (tag := _ENDING.search(text, self._scan)) is not None:
            place = self._scan = tag.start()
            verdict, behind = self._ends_value(tag[0], place, ended)
            if verdict == "yes":
                self._end_value(place, behind)
                return verdict
            if verdict == "wait":
                break
            self._scan += 1
        else:
            self._scan = unfinished_tag(text, self._scan, _IN_VALUE)
        if ended:
            if not self.committed:
                return "no"
            self._end_value(len(text), len(text))
            return "yes"
        self._write_string(self._scan)
        return "wait"

    def _ends_value(self, tag: str, place: int, ended: bool) -> tuple[Verdict, int]:
        """Whether the value ends in front of the `tag` at `place`, and the place from which the call goes on."""
        if tag == CLOSE_PARAMETER:
            behind = place + len(tag)
            return follows(self.text, behind, PARAMETER_ENDS, ended)[0], behind
        if tag == OPEN_PARAMETER:
            return self._next_parameter(place, ended), place
        return follows(self.text, place, VALUE_BREAKS_OFF, ended)[0], place

    def _next_parameter(self, place: int, ended: bool) -> Verdict:
        """Whether a parameter begins here although the one before is not closed: alone on its line, one that the tool
        has and the call has not yet."""
        text = self.text
        first = place == self.at and not self._string
        if not first and (place == self.at or text[place - 1] != "\n"):
            return "no"
        verdict, name, behind = named_tag(text, place, OPEN_PARAMETER)
        if verdict != "yes":
            return "no" if ended else verdict
        if name in self._given or not self._tools.has_parameter(self._name, name):
            return "no"
        if behind == len(text):
            return "no" if ended else "wait"
        return "yes" if text[behind] == "\n" else "no"

    def _write_string(self, end: int) -> None:
        """Write the open value up to `end` if it is known to be a string."""
        if end > self.at and self.text[end - 1] == "\n":
            end -= 1
        if end <= self.at or not self._parameter.streams:
            return
        value = self.text[self.at : end]
        if not self._string:
            if not self._parameter.is_string(value):
                return
            self._string = True
            self._written.append('"')
        self._written.append(to_json(value)[1:-1])
        self.at = end

    def _end_value(self, end: int, behind: int) -> None:
        value = self.text[self.at : end].removesuffix("\n")
        self._written.append(to_json(value)[1:] if self._string else self._parameter.json(value))
        self._open, self.at = None, behind

    def _close(self, at: int) -> None:
        self.at = at
        self._closed = True
        if self._given:
            self._written.append("}")
            return
        body = json_object(self.stray)
        arguments = value_json(body) if body is not None else None
        if arguments is not None:  # as one object, which is another family's form
            self._stray.clear()
        self._written.append(arguments or "{}")

    def _forget(self) -> None:
        self._raw.append(self.text[: self.at])
        self.text = self.text[self.at :]
        self._scan -= self.at
        self.at = 0
