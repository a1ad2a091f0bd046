"""Token ids in, the pieces of an answer out: the one incremental parser.

Bytes, then text, then what are thoughts; the rest is searched for tool calls, and what is left for stop strings.
"""

import codecs
import uuid
from collections.abc import Callable, Sequence

from services.gateway.output.call_part import CallPart
from services.gateway.output.pieces import CallDelta, Content, Piece, Reasoning
from services.gateway.output.stop_strings import StopStrings
from services.gateway.output.thoughts import Thoughts
from services.gateway.output.token_bytes import TokenBytes
from services.gateway.output.tool_arguments import Tools
from services.gateway.output.tool_calls import ToolCalls

_utf8 = codecs.getincrementaldecoder("utf-8")


def _call_id() -> str:
    """Unlike any other's: clients put the calls of a whole conversation into one table."""
    return f"call_{uuid.uuid4().hex[:24]}"


class OutputParser:
    """One answer's state. Every cut of the same tokens into `feed` calls gives the same pieces, but for the places at
    which texts are cut, and the same counts.

    Text never ends within a character; bytes that are no UTF-8 become U+FFFD as in `bytes.decode("utf-8", "replace")`
    of the whole. Stop strings are looked for in the content alone: neither a thought nor a tool call's argument ends
    an answer. The text before a stop string is given, the stop string and what follows are not.
    """

    __slots__ = (
        "_bytes",
        "_call_id",
        "_calls",
        "_decoder",
        "_stops",
        "_thought_calls",
        "_thoughts",
        "calls",
        "consumed",
        "reasoning_tokens",
        "stopped",
    )

    def __init__(
        self,
        token_bytes: TokenBytes,
        stop: Sequence[str] = (),
        *,
        thinking: bool | None = False,
        tools: Tools | None = None,
        call_id: Callable[[], str] = _call_id,
    ) -> None:
        """`thinking`: the prompt ends within the thoughts; None: nothing is thoughts. `tools`: those that may be
        called; with None or none, calls are text like any other. `call_id` gives each call its id."""
        self._bytes = token_bytes
        self._decoder = _utf8("replace")
        self._thoughts = Thoughts(thinking)
        self._calls = ToolCalls(tools) if tools else None
        self._thought_calls = ToolCalls(tools, at_end=True) if tools else None
        """Looks for calls among the thoughts, until some of the answer is given."""
        self._stops = StopStrings(stop) if stop else None
        self._call_id = call_id
        self.calls = 0
        """Tool calls so far."""
        self.consumed = 0
        """Tokens of the answer so far, the one that completed a stop string included, those behind it not."""
        self.reasoning_tokens = 0
        """Those of `consumed` that were thoughts, the closing tag included."""
        self.stopped = False
        """A stop string was found: the answer is complete."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._stops.found if self._stops is not None else None

    def feed(self, tokens: Sequence[int]) -> list[Piece]:
        """What these tokens complete. Nothing once `stopped`."""
        pieces: list[Piece] = []
        if self._thoughts.untagged and b"<" not in (data := self._bytes.join(tokens)):
            self.consumed += len(tokens)
            self.reasoning_tokens += len(tokens)
            self._text(self._decoder.decode(data), pieces)
            return pieces
        for place, token in enumerate(tokens):
            if self.stopped:
                break
            if self._thoughts.over and self._stops is None:  # what is left needs no counting token by token
                self.consumed += len(tokens) - place
                self._answer(self._decoder.decode(self._bytes.join(tokens[place:])), pieces)
                break
            self.consumed += 1
            inside = self._thoughts.inside
            self._text(self._decoder.decode(self._bytes[token]), pieces)
            self.reasoning_tokens += inside or self._thoughts.inside
        return pieces

    def finish(self, complete: bool = True) -> list[Piece]:
        """The rest, at the end of the answer: one U+FFFD for a half character, and what was held back. `complete`:
        the model has ended it (`stop`); else a tool call that is still open stays without its end."""
        pieces: list[Piece] = []
        if self.stopped:
            return pieces
        self._text(self._decoder.decode(b"", True), pieces)
        thoughts, answer = self._thoughts.finish()
        self._think(thoughts, pieces)
        self._answer(answer, pieces)
        if self._calls is not None and not self.stopped:
            found = self._calls.finish(complete)
            if not any(isinstance(part, CallPart) or not part.isspace() for part in found):
                self._end_thoughts(self._thought_calls.finish(complete) if self._thought_calls else (), pieces)
            self._take(found, pieces)
        if self._stops is not None and not self.stopped:
            _add(pieces, Content(self._stops.release()))
        return pieces

    def _text(self, text: str, pieces: list[Piece]) -> None:
        thoughts, answer = self._thoughts.feed(text)
        self._think(thoughts, pieces)
        self._answer(answer, pieces)

    def _think(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        if self._thought_calls is None:
            _add(pieces, Reasoning(text))
            return
        for part in self._thought_calls.feed(text):
            assert isinstance(part, str), "among thoughts there are no calls before the end"
            _add(pieces, Reasoning(part))

    def _answer(self, text: str, pieces: list[Piece]) -> None:
        if not text or self.stopped:
            return
        if self._calls is None:
            self._content(text, pieces)
        else:
            self._take(self._calls.feed(text), pieces)

    def _take(self, found: Sequence[str | CallPart], pieces: list[Piece]) -> None:
        if found and self._thought_calls is not None:
            self._end_thoughts(self._thought_calls.release(), pieces)
        for part in found:
            if self.stopped:
                return
            if isinstance(part, str):
                self._content(part, pieces)
            else:
                self._call(part, pieces)

    def _end_thoughts(self, found: Sequence[str | CallPart], pieces: list[Piece]) -> None:
        """The rest of the thoughts: text, or the calls that the model made there and did nothing after."""
        self._thought_calls = None
        for part in found:
            if isinstance(part, str):
                _add(pieces, Reasoning(part))
            else:
                self._call(part, pieces)

    def _call(self, part: CallPart, pieces: list[Piece]) -> None:
        call_id = ""
        if part.name:
            call_id = self._call_id()
            self.calls += 1
            if self._stops is not None:  # no stop string reaches over a call
                _add(pieces, Content(self._stops.release()))
        _add(pieces, CallDelta(self.calls - 1, part.arguments, call_id, part.name, part.done, part.raw))

    def _content(self, text: str, pieces: list[Piece]) -> None:
        if self._stops is not None:
            text, self.stopped = self._stops.feed(text)
        _add(pieces, Content(text))


def _add(pieces: list[Piece], piece: Piece) -> None:
    """Append a piece, to the last one if that is of the same kind and the same call."""
    last = pieces[-1] if pieces else None
    match piece:
        case CallDelta():
            if isinstance(last, CallDelta) and last.index == piece.index:
                arguments = last.arguments + piece.arguments
                pieces[-1] = CallDelta(piece.index, arguments, last.id, last.name, piece.done, piece.raw)
            else:
                pieces.append(piece)
        case Content(text) | Reasoning(text) if text:
            if type(last) is type(piece):
                pieces[-1] = type(piece)(last.text + text)
            else:
                pieces.append(piece)
