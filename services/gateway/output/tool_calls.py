"""Finds tool calls in text that arrives in pieces.

The family's form (see `structure`) is a call as soon as its `<function=NAME>` closes, and is given out from there on
while it is written. What has drifted from it is one too, but only when it is whole, since it may be an example: without
the `<tool_call>`, at the start of a line, if it names a declared tool; as JSON, likewise. Within code it is a call only
if nothing but calls follows to the end of the answer, as the end of an example does.
"""

from services.gateway.output.call_part import CallPart
from services.gateway.output.code_marks import CodeMarks
from services.gateway.output.held import unfinished_tag
from services.gateway.output.json_call import JsonCall
from services.gateway.output.open_call import OpenCall
from services.gateway.output.structure import OPEN_CALL, OPEN_FUNCTION, skip_space
from services.gateway.output.tool_arguments import Tools

_OPENINGS = (OPEN_CALL, OPEN_FUNCTION)
_UNFINISHED = 32
"""Calls without an end that are tried at the end of an answer, each of which reads the rest once more."""


class ToolCalls:
    """Text in; text without the calls, and the calls, out: the same whatever the cut, but for the places at which
    texts and arguments are cut.

    What has the form of a call but is none stays text. White space around calls belongs to them.
    """

    __slots__ = (
        "_after_call",
        "_at_end",
        "_call",
        "_doubtful",
        "_held",
        "_marks",
        "_pending",
        "_pending_text",
        "_tools",
        "_unfinished",
    )

    def __init__(self, tools: Tools, at_end: bool = False) -> None:
        """`at_end`: treat the text as code is."""
        self._tools = tools
        self._at_end = at_end
        self._held = ""
        """Not given out yet; while a call is open: the white space in front of it."""
        self._call: OpenCall | JsonCall | None = None
        self._doubtful = False
        """The call that is open, or about to be, counts only at the end."""
        self._pending: list[CallPart] = []
        """Calls that count if nothing else follows, and what they are if something does."""
        self._pending_text = ""
        self._after_call = False
        """Nothing but white space came since the last call."""
        self._marks = CodeMarks()
        self._unfinished = 0

    def feed(self, text: str) -> list[str | CallPart]:
        if self._call is not None:
            self._call.text += text
        elif not self._held and not self._after_call and not self._pending and _plain(text):
            self._marks.feed(text)
            return [text]
        else:
            self._held += text
        return self._run(ended=False)

    def finish(self, complete: bool) -> list[str | CallPart]:
        """The rest, at the end of the answer. `complete`: the model ended it itself; if not, a call that is still open
        is dropped, for its values may be cut."""
        if not complete:
            opened = self._call is not None or self._held.lstrip().startswith(OPEN_CALL)
            return [] if opened and not self._doubtful else self.release()
        out = self._run(ended=True)
        out += self._pending
        self._pending.clear()
        return out

    def release(self) -> list[str | CallPart]:
        """All that is held back, as text."""
        call = self._call.text if self._call is not None else ""
        text = self._pending_text + self._held + call
        if self._after_call and not self._pending:
            text = text.lstrip()
        self._held = self._pending_text = ""
        self._pending.clear()
        self._call = None
        return [text] if text else []

    def _run(self, ended: bool) -> list[str | CallPart]:
        out: list[str | CallPart] = []
        while self._call is not None or self._open(out, ended):
            call = self._call
            assert call is not None
            verdict = call.read(ended)
            if call.committed:
                self._take(call, out)
            if verdict == "wait":
                break
            self._call = None
            if verdict == "yes":
                self._close(call, out)
                continue
            opening = OPEN_CALL if call.text.startswith(OPEN_CALL) else OPEN_FUNCTION
            length = len(self._held) + len(opening)
            self._held += call.text
            self._unfinished += ended
            self._text(length if self._unfinished < _UNFINISHED else len(self._held), out)
        return out

    def _open(self, out: list[str | CallPart], ended: bool) -> bool:
        """Give out the text up to the next opening tag, which begins the open call; False when there is none."""
        held = self._held
        places = [place for place in map(held.find, _OPENINGS) if place >= 0]
        start = min(places, default=len(held))
        if not places:
            if not ended:
                start = len(held[: unfinished_tag(held, 0, _OPENINGS)].rstrip())
            self._text(start, out)
            return False
        self._text(len(held[:start].rstrip()), out)
        start = skip_space(self._held, 0)
        space, text = self._held[:start], self._held[start:]
        tagged = text.startswith(OPEN_CALL)
        inner = skip_space(text, len(OPEN_CALL)) if tagged else 0
        marks = self._marks.after(space)
        self._doubtful = self._at_end or marks.in_code
        if inner == len(text) and not ended:
            return False
        line_start = self._after_call or bool(self._pending) or marks.at_line_start
        self._held = space
        if text.startswith("{", inner) and line_start:
            self._call = JsonCall(self._tools, text)
        else:
            names = "declared" if self._doubtful or not tagged or not line_start else "any"
            self._call = OpenCall(
                self._tools,
                text,
                names=names if tagged or line_start else "none",
                live=tagged and not self._doubtful,
            )
        return True

    def _close(self, call: OpenCall | JsonCall, out: list[str | CallPart]) -> None:
        """The call is whole: what it says, and what stands behind it."""
        space, self._held = self._held, call.text[call.at :]
        if self._doubtful:
            self._pending_text += space + call.text[: call.at]
            self._take(call, self._pending)
            return
        self._take(call, out)
        self._after_call = True
        self._marks.feed("\n")
        if call.stray:
            self._held = call.stray + "\n" + self._held

    @staticmethod
    def _take(call: OpenCall | JsonCall, out: list[str | CallPart] | list[CallPart]) -> None:
        part = call.take()
        if part is not None:
            out.append(part)

    def _text(self, length: int, out: list[str | CallPart]) -> None:
        """Give out so much of what is held."""
        text, self._held = self._held[:length], self._held[length:]
        if self._pending:
            if not text or text.isspace():
                self._pending_text += text
                return
            text = self._pending_text + text
            self._pending.clear()
            self._pending_text = ""
        elif self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            self._marks.feed(text)
            out.append(text)


def _plain(text: str) -> bool:
    """Nothing in it may belong to a call."""
    return "<" not in text and not text[-1:].isspace()
