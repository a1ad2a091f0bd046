"""How an API family puts one answer into its own words; `stream.py` decides when what is sent."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.gateway.errors import ApiError
from services.gateway.miss import Miss
from services.gateway.output.pieces import Piece
from services.protocol.generate import FinishReason, Usage


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer came to its end, known before its cost is."""

    reason: FinishReason
    """`stop` or `length`."""
    calls: int = 0
    """Tool calls in the answer."""
    stop_string: str | None = None
    """The stop string that ended it."""


@dataclass(frozen=True, slots=True)
class Cost:
    usage: Usage
    reasoning_tokens: int
    """Of the output tokens."""
    missed: Miss | None = None


class Renderer(Protocol):
    """Renders one answer, either as events or as a whole. For one use: it may keep state from call to call.

    A stream is `opening`, then `keepalive`s and `pieces` (with `lead` in front of the first), then either `error`, or
    `finish` (`lead` in front of it where no piece came) and `closing`.
    """

    @property
    def opening(self) -> bytes:
        """Goes out with the headers, before an engine has begun; may be empty."""
        ...

    @property
    def waits_for_usage(self) -> bool:
        """Whether `closing` needs the cost: it may come some seconds after the last piece."""
        ...

    def lead(self, cached: int | None) -> bytes:
        """Goes out in front of the first piece; may be empty. `cached`: prompt tokens that were found in a cache, None
        where no engine has said."""
        ...

    def keepalive(self) -> bytes:
        """An event that changes nothing, while there is nothing to say."""
        ...

    def pieces(self, pieces: Iterable[Piece]) -> bytes:
        """The events of these pieces; nothing for none."""
        ...

    def finish(self, ending: Ending) -> bytes:
        """What a complete answer ends with, as far as it needs no cost; may be empty."""
        ...

    def closing(self, cost: Cost | None) -> bytes:
        """The last bytes of a complete stream. `cost` is given where `waits_for_usage`."""
        ...

    def error(self, error: ApiError) -> bytes:
        """The last bytes of a stream that fails half-way."""
        ...

    def whole(self, pieces: Sequence[Piece], ending: Ending, cost: Cost) -> bytes:
        """The body of an answer that is not streamed."""
        ...

    def failure(self, error: ApiError) -> tuple[int, bytes]:
        """Status and body of an answer that is not streamed and failed."""
        ...
