"""One answer as text, while it is produced."""

from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from services.gateway.errors import ApiError, broken, taken_over, unavailable
from services.gateway.ledger import CLIENT_CLOSED, Ledger
from services.gateway.output.heard_answer import HeardAnswer
from services.gateway.output.heard_calls import HeardCalls
from services.gateway.output.parser import OutputParser
from services.gateway.output.pieces import Piece
from services.gateway.token_stream import Chunk, TokenStream
from services.protocol.generate import FinishReason, Usage

_BROKE_OFF = "The answer broke off before it was complete."


class Delta(Struct, frozen=True):
    pieces: Sequence[Piece]
    finish: FinishReason | None = None
    """Set on the last delta, and only there."""
    error: ApiError | None = None
    """What the client is told when the answer ended before it was complete."""


class Answer:
    """Reads a TokenStream through an OutputParser and keeps the ledger. Read by one task; any other on the same loop
    may end it."""

    def __init__(
        self,
        stream: TokenStream,
        parser: OutputParser,
        ledger: Ledger,
        heard: HeardCalls | None = None,
        ended: Callable[[Sequence[int]], None] | None = None,
        written: HeardAnswer | None = None,
        left: Callable[[FinishReason, int], None] | None = None,
    ) -> None:
        """`heard` is told of all pieces from the first call on, `written` of all pieces. `left` is told how the answer
        ended, and of its calls, as soon as that is known; `ended` of all tokens when the answer is closed."""
        self.ledger = ledger
        self._stream = stream
        self._parser = parser
        self._heard = heard
        self._ended_with = ended
        self._written = written
        self._left = left
        self._over = False
        self._last: Chunk | None = None
        self._finish: FinishReason | None = None
        self._error: ApiError | None = None
        self._ended = ""
        self._handed_over = False
        self.abandoned = False
        """The client has left."""

    async def next(self) -> Delta:
        """What arrived since the last call, without a piece where it completes none. May be cancelled and
        called again; not to be called after the delta with `finish`."""
        chunk = await self._stream.next() if not self._handed_over else None
        if chunk is None or self._handed_over:  # before or while it waited
            return Delta([], self._finish, self._error)
        if chunk.tokens:
            self.ledger.tokens()
        pieces = self._parser.feed(chunk.tokens)
        if chunk.finish is not None:
            self._last = chunk
            pieces += self._parser.finish(complete=chunk.finish == "stop")
        if self._heard is not None and self._parser.calls:
            self._heard.hear(pieces)
        if self._written is not None:
            self._written.hear(pieces)
        if self._parser.stopped:
            self._stream.cancel()
            self._finish = "stop"
        elif chunk.finish is not None:
            self._finish = chunk.finish
            if chunk.finish == "cancel":
                self._error = unavailable(self._ended or _BROKE_OFF)
            elif chunk.finish == "error":
                self._error = broken(chunk.error or _BROKE_OFF)
        if self._finish is not None:
            self._tell_end()
        return Delta(pieces, self._finish, self._error)

    def _tell_end(self) -> None:
        """Before the client has the end: it may ask for what follows at once."""
        if self._over:
            return
        self._over = True
        if self._written is not None:
            self._written.end(whole=self._finish == "stop" and not self._parser.stopped)
        if self._left is not None:
            self._left("cancel" if self.abandoned else self._finish or "cancel", self._parser.calls)

    def wake(self) -> None:
        """Let `next` return at once, without a piece where there is none."""
        if not self._handed_over:
            self._stream.wake()

    @property
    def running(self) -> bool:
        """Whether it may be handed over."""
        return self._finish is None and not self.abandoned and not self._stream.cancelled_at

    def hand_over(self) -> TokenStream:
        """Leave the stream to another answer, which reads it from the start; the client of this one is told so. Only
        while `running`."""
        self._handed_over = True
        if self._written is not None:
            self._written.drop()
        self._finish = "cancel"
        self._error = taken_over()
        self._stream.hand_over()
        return self._stream

    @property
    def calls(self) -> int:
        """Tool calls so far."""
        return self._parser.calls

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._parser.stop_string

    @property
    def prompt(self) -> bytes:
        """Packed ids."""
        return self._stream.request.prompt

    @property
    def prompt_tokens(self) -> int:
        """All of the prompt, known from the start."""
        return self._stream.prompt_tokens

    @property
    def cached_tokens(self) -> int | None:
        """Of the prompt; known with the first token."""
        return self._stream.cached

    @property
    def reasoning_tokens(self) -> int:
        """Output tokens so far that were thoughts."""
        return self._parser.reasoning_tokens

    async def usage(self) -> Usage:
        """Of the whole request; waits for the engine's last word, which comes a step after a stop string (and after
        some seconds at most, see TokenStream.cancel). Output tokens are those that the client was given."""
        while self._last is None and not self._handed_over:
            chunk = await self._stream.next()
            if chunk.finish is not None:
                self._last = chunk
        return self._usage()

    def _usage(self) -> Usage:
        known = self._last.usage if self._last is not None else None
        if known is None:
            known = Usage(prompt_tokens=self._stream.prompt_tokens, output_tokens=0)
        return msgspec.structs.replace(known, output_tokens=self._parser.consumed)

    def abandon(self) -> None:
        """The client has left: stop the engine at once, wherever the request is. Its last delta still arrives."""
        if self._finish is None and not self.abandoned:
            self.abandoned = True
            self._stream.cancel()

    def end(self, reason: str) -> None:
        """Stop the engine for the server's own sake and tell the client `reason`, without waiting for the engine."""
        if self._finish is None:
            self._ended = reason
            self._stream.cancel()
            self._stream.end("cancel")

    def close(self, status: int) -> None:
        """Write the ledger, with what is known; `status` is what the client was sent. Idempotent; a stream that still
        runs is cancelled."""
        if self._handed_over:
            self.ledger.refused(taken_over())
            return
        self._stream.cancel()
        self._tell_end()
        if self._ended_with is not None:
            self._ended_with(self._stream.output)
        self.ledger.engine_id = self._stream.engine_id
        self.ledger.reasoning_tokens = self.reasoning_tokens
        if self.abandoned:
            self.ledger.finished(CLIENT_CLOSED, "cancel", self._usage())
        else:
            self.ledger.finished(status, self._finish or "cancel", self._usage(), self._error)
