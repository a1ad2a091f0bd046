"""Whether a place in a Markdown text lies within code, where what looks like a tool call is likely an example."""

import re

_FENCE = re.compile(r"\s*(`{3,}|~{3,})(.*)")
_HEAD = 64
"""Characters at a line's start that are kept: a fence stands in front of them all."""


class CodeMarks:
    """Reads a text in pieces and knows about the place behind the last one."""

    __slots__ = ("_fence", "_head", "_ticks")

    def __init__(self) -> None:
        self._fence = ""
        """The mark that opened the fence that is open."""
        self._head = ""
        self._ticks = 0
        """Backticks on this line."""

    def feed(self, text: str) -> None:
        if "\n" in text:
            *lines, text = text.split("\n")
            for line in lines:
                self._extend(line)
                self._end_line()
        self._extend(text)

    def after(self, text: str) -> "CodeMarks":
        """The state that `text` would lead to."""
        marks = CodeMarks()
        marks._fence, marks._head, marks._ticks = self._fence, self._head, self._ticks
        marks.feed(text)
        return marks

    @property
    def in_code(self) -> bool:
        """In a fence or, by the count of backticks on the line, in a code span."""
        return bool(self._fence) or self._ticks % 2 == 1

    @property
    def at_line_start(self) -> bool:
        """Nothing but white space stands on the line."""
        return not self._head or self._head.isspace()

    def _extend(self, text: str) -> None:
        self._ticks += text.count("`")
        if len(self._head) < _HEAD:
            self._head += text[:_HEAD]

    def _end_line(self) -> None:
        fence = _FENCE.match(self._head) if self._ticks > 2 or "~" in self._head else None
        if fence is not None:
            mark, rest = fence.groups()
            if not self._fence:
                self._fence = mark
            elif mark.startswith(self._fence) and not rest.strip():
                self._fence = ""
        self._head, self._ticks = "", 0
