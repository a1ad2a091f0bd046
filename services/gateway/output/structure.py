"""The tags of the family's tool calls, and what may follow one of them. The family writes

    <tool_call>
    <function=NAME>
    <parameter=P>
    VALUE
    </parameter>
    </function>
    </tool_call>

Values are opaque: nothing in them is escaped, so a value may hold these very tags. A tag within a value counts only
where what comes next, white space aside, could follow it in a call.
"""

import re
from collections.abc import Iterable
from typing import Literal

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
OPEN_FUNCTION, CLOSE_FUNCTION = "<function=", "</function>"
OPEN_PARAMETER, CLOSE_PARAMETER = "<parameter=", "</parameter>"

END = ""
"""The end of the answer, among the tags of a Chain."""

Verdict = Literal["yes", "no", "wait"]
"""`wait`: more text is needed to tell."""

Chain = tuple[tuple[str, ...], tuple[str, ...]]
"""Closing tags that are read, one after the other, and what must come behind them and is not read."""

ANOTHER_CALL = (OPEN_CALL, OPEN_FUNCTION)

CALL_ENDS: tuple[Chain, ...] = (
    ((CLOSE_FUNCTION, CLOSE_CALL), ()),
    ((CLOSE_FUNCTION,), (OPEN_CALL,)),
    ((CLOSE_FUNCTION,), (OPEN_FUNCTION,)),
    ((CLOSE_FUNCTION,), (END,)),
    ((CLOSE_CALL,), ()),
    ((), (END,)),
    ((), ANOTHER_CALL),
)
"""How a call ends behind a parameter or behind its head."""

PARAMETER_ENDS: tuple[Chain, ...] = (((), (OPEN_PARAMETER,)), *CALL_ENDS)
"""What makes a `</parameter>` count."""

VALUE_BREAKS_OFF: tuple[Chain, ...] = (
    ((CLOSE_FUNCTION, CLOSE_CALL), (END,)),
    ((CLOSE_FUNCTION, CLOSE_CALL), ANOTHER_CALL),
    ((CLOSE_CALL,), (END,)),
    ((CLOSE_CALL,), ANOTHER_CALL),
    ((CLOSE_FUNCTION,), (END,)),
)
"""How a call ends within a value whose `</parameter>` is missing."""

_SPACE = re.compile(r"\s*")
_NAME_CHARS = 256
_NAME = re.compile(rf"[^<>\n]{{1,{_NAME_CHARS}}}")


def skip_space(text: str, at: int) -> int:
    """The place behind white space."""
    space = _SPACE.match(text, at)
    return space.end() if space else at


def follows(text: str, at: int, chains: Iterable[Chain], ended: bool) -> tuple[Verdict, int]:
    """Whether one of the chains stands at `at`, and the place behind what it reads. `ended`: no text will come."""
    wait = False
    for read, ahead in chains:
        verdict, behind = _stand(text, at, read, ended)
        if verdict == "yes":
            verdict, _ = _stand(text, behind, ahead, ended)
        if verdict == "yes":
            return "yes", len(text) if ahead == (END,) else behind
        wait |= verdict == "wait"
    return ("wait" if wait else "no"), at


def _stand(text: str, at: int, tags: Iterable[str], ended: bool) -> tuple[Verdict, int]:
    for tag in tags:
        start = skip_space(text, at)
        if tag == END:
            if start < len(text):
                return "no", at
            return ("yes" if ended else "wait"), start
        if not text.startswith(tag, start):
            return ("wait" if not ended and tag.startswith(text[start : start + len(tag)]) else "no"), at
        at = start + len(tag)
    return "yes", at


def named_tag(text: str, at: int, opening: str) -> tuple[Verdict, str, int]:
    """Reads `<opening=NAME>`: the name, and the place behind it."""
    if not text.startswith(opening, at):
        return ("wait" if opening.startswith(text[at : at + len(opening)]) else "no"), "", at
    start = at + len(opening)
    name = _NAME.match(text, start)
    end = name.end() if name else start
    if end == len(text) and end - start < _NAME_CHARS:
        return "wait", "", at
    if name is None or text[end : end + 1] != ">" or not name[0].strip():
        return "no", "", at
    return "yes", name[0].strip(), end + 1
