"""One request's tokens as they arrive from the bus: put in order, merged for the reader, never lost silently.

Pure bookkeeping on the event loop's thread. Asking for what is missing is the work of `recovery.py`.
"""

import asyncio
import time
from collections.abc import Callable, Mapping

from msgspec import Struct

from services.protocol.events import ModelCard
from services.protocol.generate import FinishReason, GenerateRequest, SamplingParams, TokenDelta, Usage

STALL_SECONDS = 3.0
"""An engine silent about a request for this long is asked (a lost last delta looks like silence). Doubles up to
STALL_SECONDS_MAX while the answer is that there is nothing new: the request waits in the queue or in a long prefill."""
STALL_SECONDS_MAX = 15.0


class Chunk(Struct, frozen=True):
    """Everything that arrived since the last one."""

    tokens: list[int]
    finish: FinishReason | None = None
    """Set on the last chunk only, and there always; then `usage` is set as well."""
    usage: Usage | None = None
    error: str = ""
    """With finish `error`: what went wrong, for people."""


class TokenStream:
    """Made by `EngineClient.generate`; read by one task with `next`."""

    def __init__(
        self,
        request: GenerateRequest,
        headers: Mapping[str, str] | None,
        on_cancel: Callable[["TokenStream"], None],
    ) -> None:
        """`request` as the first engine gets it; `headers` carry the trace."""
        self.request = request
        self.headers = headers
        self.engine_id = ""
        """Where the request runs just now."""
        self.migrations = 0
        """How often the request was given to another engine, or to the same one after its restart."""
        self.output: list[int] = []
        """All tokens so far, in order and without gap."""
        self.cached: int | None = None
        """Prompt tokens that an engine found in a cache; known with the first token."""
        self.cancelled_at = 0.0
        """time.monotonic() of the first `cancel`, 0 before."""
        self._on_cancel = on_cancel
        self._ahead: list[TokenDelta] = []
        self._read = 0
        self._reader = 0
        """Counts the readers that it was handed to."""
        self._last: Chunk | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._woken = False

        self.cancel_sent = 0.0
        # The rest is the state that EngineClient and its helpers keep about the request's present engine.
        self.card: ModelCard | None = None
        self.incarnation = ""
        self.wire_id = ""
        """The request's id on the bus: a new one for each engine that it is given to, so that late deltas of an
        engine that was taken for dead cannot mix with those of its successor."""
        self.attempt = 0
        """Counts the engines that it was offered to."""
        self.placed = False
        """An engine has accepted it."""
        self.heard = 0.0
        """time.monotonic() when that engine last said something about it; 0: not yet."""
        self.patience = STALL_SECONDS
        self.suspect = False
        """Something may have been missed: the engine must be asked."""
        self.interrupted = False
        """The engine gave it up though the reader did not (drained, or it took this gateway for dead)."""
        self.fruitless = 0
        """Engines in a row that were lost before they gave a single token."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt) // 4

    @property
    def done(self) -> bool:
        """Nothing more will arrive (the reader may still have something to read)."""
        return self._last is not None

    async def next(self) -> Chunk:
        """All tokens that arrived since the last call; waits until there is something to say, or `wake`.

        After the chunk with `finish` it returns an empty chunk with the same finish, at once. Never raises for a
        fault of engine or bus: that is a chunk with finish `error`. May be cancelled and called again.
        """
        reader = self._reader
        while self._read == len(self.output) and self._last is None and not self._woken:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            if self._reader != reader:
                return Chunk([])
        self._woken = False
        tokens = self.output[self._read :]
        self._read = len(self.output)
        last = self._last
        if last is None:
            return Chunk(tokens)
        return Chunk(tokens, last.finish, last.usage, last.error)

    def wake(self) -> None:
        """Let the reader's `next` return at once, with an empty chunk where nothing has arrived."""
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def hand_over(self) -> None:
        """Give all tokens again, from the first one on, to another reader. The present one gets an empty chunk if it
        waits, and must not read any more."""
        self._reader += 1
        self._read = 0
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self) -> None:
        """Ask the engine to stop. Idempotent, does nothing after the end. The chunk with `finish` still arrives,
        after some seconds even if the engine never answers."""
        if self._last is None and not self.cancelled_at:
            self.cancelled_at = self.cancel_sent = time.monotonic()
            self._on_cancel(self)

    @property
    def needs_help(self) -> bool:
        """Whether Recovery has something to do, apart from the loss of the engine itself."""
        return self._last is None and (self.suspect or self.interrupted or bool(self._ahead))

    @property
    def gap(self) -> bool:
        """Whether later tokens arrived and earlier ones are missing."""
        return bool(self._ahead)

    def assign(self, engine_id: str, incarnation: str, card: ModelCard) -> None:
        """The request is about to be offered to this engine, behind the tokens that are here already."""
        self.attempt += 1
        self.engine_id, self.incarnation, self.card = engine_id, incarnation, card
        self.wire_id = self.request_id if self.attempt == 1 else f"{self.request_id}.{self.attempt}"
        self.placed = self.suspect = self.interrupted = False
        self.heard, self.patience = 0.0, STALL_SECONDS
        self._ahead.clear()

    def accept(self, delta: TokenDelta, now: float) -> None:
        """Take one delta of the present engine, in any order and any number of times."""
        if self._last is not None:
            return
        self.heard = now
        if delta.offset > len(self.output):
            self._ahead.append(delta)
            return
        self._append(delta)
        if self._ahead:
            self._take_ahead()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def end(self, finish: FinishReason, error: str = "") -> None:
        """Finish without the engine: it is gone, or does not answer a cancel. Usage is what is known here."""
        if self._last is None:
            self._finish(finish, None, error)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    def _append(self, delta: TokenDelta) -> None:
        """`delta.offset` is not beyond the end of the output."""
        if delta.cached is not None and self.cached is None:
            self.cached = min(delta.cached, self.prompt_tokens)
        fresh = delta.tokens[len(self.output) - delta.offset :]
        if fresh:
            self.output.extend(fresh)
            self.fruitless = 0
            self.patience = STALL_SECONDS
        if delta.finish == "cancel" and not self.cancelled_at:
            self.interrupted = True
        elif delta.finish is not None:
            self._finish(delta.finish, delta.usage, delta.error)

    def _take_ahead(self) -> None:
        """Append what came too early and now fits."""
        self._ahead.sort(key=lambda delta: (delta.offset, delta.finish is not None))
        while self._ahead and self._ahead[0].offset <= len(self.output) and self._last is None:
            self._append(self._ahead.pop(0))

    def _finish(self, finish: FinishReason, usage: Usage | None, error: str) -> None:
        self._ahead.clear()
        whole = self._whole_usage(usage)
        if self.cached is None and usage is not None:
            self.cached = whole.cached_tokens
        self._last = Chunk([], finish, whole, error)

    def _whole_usage(self, last: Usage | None) -> Usage:
        """Usage of the whole request, whatever number of engines had a part in it.

        Tokens are those of this stream. An engine that resumed the request may have found the output of its
        predecessor in its cache too, so its cache counts are bounded by the prompt. Times are those of the last engine.
        """
        prompt, output = self.prompt_tokens, len(self.output)
        if last is None:
            return Usage(prompt_tokens=prompt, output_tokens=output)
        device = min(last.cached_device, prompt)
        host = min(last.cached_host, prompt - device)
        return Usage(
            prompt_tokens=prompt,
            output_tokens=output,
            cached_device=device,
            cached_host=host,
            cached_disk=min(last.cached_disk, host),
            computed_tokens=last.computed_tokens,
            preemptions=last.preemptions,
            queue_seconds=last.queue_seconds,
            restore_seconds=last.restore_seconds,
            prefill_seconds=last.prefill_seconds,
            decode_seconds=last.decode_seconds,
            missed=last.missed,
        )
