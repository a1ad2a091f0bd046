"""Token ids in, text out: the one incremental parser of an answer."""

import codecs
from collections.abc import Sequence

from services.gateway.output.stop_strings import StopStrings
from services.gateway.output.token_bytes import TokenBytes

_utf8 = codecs.getincrementaldecoder("utf-8")


class OutputParser:
    """One answer's state. Every cut of the same tokens into `feed` calls gives the same text and the same count.

    Text never ends within a character; bytes that are no UTF-8 become U+FFFD as in `bytes.decode("utf-8", "replace")`
    of the whole. The text before a stop string is given, the stop string and what follows are not.
    """

    __slots__ = ("_bytes", "_decoder", "_stops", "consumed", "stopped")

    def __init__(self, token_bytes: TokenBytes, stop: Sequence[str] = ()) -> None:
        self._bytes = token_bytes
        self._decoder = _utf8("replace")
        self._stops = StopStrings(stop) if stop else None
        self.consumed = 0
        """Tokens of the answer so far, the one that completed a stop string included, those behind it not."""
        self.stopped = False
        """A stop string was found: the answer is complete."""

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete. Nothing once `stopped`."""
        if self._stops is None:
            self.consumed += len(tokens)
            return self._decoder.decode(self._bytes.join(tokens))
        parts: list[str] = []
        for token in tokens:
            if self.stopped:
                break
            self.consumed += 1
            text, self.stopped = self._stops.feed(self._decoder.decode(self._bytes[token]))
            parts.append(text)
        return "".join(parts)

    def finish(self) -> str:
        """The rest, at the end of the answer: one U+FFFD for a half character, and what was held back."""
        if self.stopped:
            return ""
        tail = self._decoder.decode(b"", True)
        if self._stops is None:
            return tail
        text, self.stopped = self._stops.feed(tail)
        return text if self.stopped else text + self._stops.release()
