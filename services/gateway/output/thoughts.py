"""Tells a model's thoughts from its answer, in text that arrives in pieces.

The form is `<think>\\n` thoughts `\\n</think>\\n\\n` answer. The tags are found in the text, whichever tokens it came
in: in the family's vocabulary each is a token, in others it is spelled out.
"""

from typing import Literal

from services.gateway.output.held import unfinished_tag

OPEN = "<think>"
CLOSE = "</think>"

_State = Literal["start", "opened", "inside", "closed", "answer"]


class Thoughts:
    """The newlines that belong to the tags are dropped: one at each inner side, two behind the closing tag."""

    __slots__ = ("_held", "_newlines", "_state")

    def __init__(self, open: bool | None) -> None:
        """`open`: the prompt ends within the thoughts. If not, the model may open them itself, first of all. None:
        there are none, all is answer."""
        self._state: _State = "answer" if open is None else "opened" if open else "start"
        self._held = ""
        self._newlines = 2
        """That may still be dropped behind the closing tag."""

    @property
    def inside(self) -> bool:
        return self._state in ("opened", "inside")

    @property
    def untagged(self) -> bool:
        """Thoughts go on until a `<` comes: none is held back."""
        return self._state == "inside" and "<" not in self._held

    @property
    def over(self) -> bool:
        """All that comes is answer, and nothing is held back."""
        return self._state == "answer"

    def feed(self, text: str) -> tuple[str, str]:
        """What is known to be thoughts, and what is known to be answer."""
        if self._state == "answer":
            return "", text
        self._held += text
        if self._state == "start":
            self._start()
        if self._state == "opened" and self._held:
            self._held = self._held.removeprefix("\n")
            self._state = "inside"
        thoughts = self._inside() if self._state == "inside" else ""
        if self._state == "closed":
            self._closed()
        return thoughts, self._release() if self._state == "answer" else ""

    def finish(self) -> tuple[str, str]:
        """What was held back, at the end of the answer."""
        return (self._release(), "") if self.inside else ("", self._release())

    def _start(self) -> None:
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._held = text[len(OPEN) :]
            self._state = "opened"
        elif not OPEN.startswith(text):
            self._state = "answer"

    def _inside(self) -> str:
        place = self._held.find(CLOSE)
        if place < 0:
            place = unfinished_tag(self._held, 0, (CLOSE,))
            place -= self._held.endswith("\n", 0, place)
            thoughts, self._held = self._held[:place], self._held[place:]
            return thoughts
        thoughts, self._held = self._held[:place].removesuffix("\n"), self._held[place + len(CLOSE) :]
        self._state = "closed"
        return thoughts

    def _closed(self) -> None:
        while self._newlines and self._held.startswith("\n"):
            self._held = self._held[1:]
            self._newlines -= 1
        if self._held or not self._newlines:
            self._state = "answer"

    def _release(self) -> str:
        held, self._held = self._held, ""
        return held
