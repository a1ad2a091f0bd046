"""Finds stop strings in text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Knuth-Morris-Pratt over all stop strings at once: one pass, whatever the cut of the pieces.

    The match that *ends* first wins, and of those the longest, so that the result does not depend on the cut. Only a
    suffix that is a proper prefix of a stop string is held back.
    """

    __slots__ = ("_failures", "_held", "_matched", "_stops", "found")

    def __init__(self, stops: Sequence[str]) -> None:
        """No stop string may be empty."""
        self._stops = tuple(stops)
        self._failures = tuple(_failure(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended."""

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that may go out, and whether a stop string ended there (then nothing may be fed any more)."""
        if not self._stops:
            return text, False
        matched = self._matched
        for place, char in enumerate(text):
            longest = 0
            for number, stop in enumerate(self._stops):
                length = matched[number]
                failure = self._failures[number]
                while length and stop[length] != char:
                    length = failure[length - 1]
                if stop[length] == char:
                    length += 1
                matched[number] = length
                if length == len(stop):
                    longest = max(longest, length)
            if longest:
                whole = self._held + text[: place + 1]
                self._held = ""
                self.found = whole[-longest:]
                return whole[:-longest], True
        whole = self._held + text
        free = len(whole) - max(matched)
        self._held = whole[free:]
        return whole[:free], False

    def release(self) -> str:
        """What was held back, at the end of the text; what is fed after it is another text."""
        self._matched = [0] * len(self._stops)
        held, self._held = self._held, ""
        return held


def _failure(stop: str) -> list[int]:
    """failure[i]: length of the longest proper prefix of `stop` that is a suffix of stop[: i + 1]."""
    failure = [0] * len(stop)
    length = 0
    for place in range(1, len(stop)):
        while length and stop[place] != stop[length]:
            length = failure[length - 1]
        if stop[place] == stop[length]:
            length += 1
        failure[place] = length
    return failure
