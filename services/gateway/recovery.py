"""Brings a stream that may have lost something back: asks its engine again, or gives it to another one.

    gap, silence, NATS was away      -> Resume: the engine still has every token
    engine lost, restarted, drained,
    or it forgot the request         -> offer `prompt + output so far` to the engines of the same fingerprint

The reader sees a pause. After `timeout` seconds without a single new token it sees an error.
"""

import logging
import time

import msgspec

from services.bus import Bus, BusError, MessageTooLarge
from services.gateway.client_counters import ClientCounters
from services.gateway.dispatch import Dispatch
from services.gateway.engines import Engines
from services.gateway.token_stream import STALL_SECONDS_MAX, TokenStream
from services.protocol import codec, subjects
from services.protocol.generate import Accepted, FinishReason, Rejected, Resume

log = logging.getLogger(__name__)

RESUME_SECONDS = 2.0
"""For the answer to a Resume."""
RETRY_SECONDS = 0.25
FRUITLESS_MAX = 3
"""Engines lost in a row without one token of this request: then the request itself may be what kills them."""


class Recovery:
    def __init__(
        self, bus: Bus, engines: Engines, dispatch: Dispatch, counters: ClientCounters, timeout: float
    ) -> None:
        self._bus = bus
        self._engines = engines
        self._dispatch = dispatch
        self._counters = counters
        self._timeout = timeout

    async def recover(self, stream: TokenStream) -> None:
        """Until the stream is in order again or has ended. One call a stream at a time."""
        deadline = time.monotonic() + self._timeout
        known = len(stream.output)
        while not stream.done:
            if len(stream.output) > known:
                known, deadline = len(stream.output), time.monotonic() + self._timeout
            if time.monotonic() > deadline:
                self._give_up(stream, self._why(stream))
            elif not self._bus.connected:
                await self._engines.wait_change(RETRY_SECONDS)
            elif self._engines.alive(stream.engine_id, stream.incarnation) and not stream.interrupted:
                if not stream.needs_help:
                    return
                if not await self._resume(stream):
                    await self._engines.wait_change(RETRY_SECONDS)
            elif stream.cancelled_at:
                stream.end("cancel")
            elif await self._resubmit(stream):
                return
            else:
                await self._engines.wait_change(RETRY_SECONDS)

    async def _resume(self, stream: TokenStream) -> bool:
        """Ask the engine for what is missing; False when it is worth a moment's wait before the next look."""
        wire_id, offset, gap = stream.wire_id, len(stream.output), stream.gap
        self._counters.resumes += 1
        try:
            data = await self._bus.request(
                subjects.resume(stream.engine_id), codec.encode(Resume(wire_id, offset)), RESUME_SECONDS
            )
            delta = codec.resume_reply.decode(data).delta
        except (BusError, msgspec.DecodeError) as error:
            log.info("resume of %s: %s", wire_id, error)
            return False
        if delta is None:
            stream.interrupted = True
            return True
        stream.suspect = False
        stream.accept(msgspec.structs.replace(delta, request_id=wire_id), time.monotonic())
        if len(stream.output) > offset or stream.done:
            if gap or stream.done:
                self._counters.gaps_filled += 1
            return True
        stream.patience = min(2 * stream.patience, STALL_SECONDS_MAX)
        return not stream.gap

    async def _resubmit(self, stream: TokenStream) -> bool:
        """Give it to another engine; True when that is done or the stream has ended."""
        assert stream.card is not None, "only a stream that was placed is recovered"
        finish = _finished(stream, stream.card.max_model_len)
        if finish is not None:
            stream.end(finish)
            return True
        length = stream.prompt_tokens + len(stream.output)
        engines = [e for e in self._engines.like(stream.card) if e.card is not None and e.card.max_model_len > length]
        if not engines:  # the old one may only have been silent, and then still has the request
            return False
        if stream.placed:
            stream.placed = False
            stream.fruitless += 1
            if stream.fruitless >= FRUITLESS_MAX:
                self._give_up(stream, f"{stream.fruitless} engines in a row were lost before they sent a token")
                return True
            # Should it run on there behind a broken connection: nobody reads its tokens.
            self._dispatch.cancel(stream.engine_id, stream.wire_id)
        before = stream.engine_id
        try:
            reply = await self._dispatch.place(stream, engines)
        except MessageTooLarge as error:
            self._give_up(stream, str(error))
            return True
        if isinstance(reply, Accepted):
            stream.migrations += 1
            self._counters.migrations += 1
            log.warning(
                "request %s goes on at engine %s (was at %s) from token %d",
                stream.request_id,
                stream.engine_id,
                before,
                len(stream.output),
            )
            return not stream.needs_help
        if isinstance(reply, Rejected) and reply.reason in ("bad_request", "context_length"):
            self._give_up(stream, reply.message)
            return True
        stream.interrupted = True
        return False

    def _why(self, stream: TokenStream) -> str:
        if not self._bus.connected:
            return f"NATS was away for more than {self._timeout:g} s"
        if not self._engines.alive(stream.engine_id, stream.incarnation) or stream.interrupted:
            return f"no engine went on with the request within {self._timeout:g} s"
        return f"engine {stream.engine_id} did not send the missing tokens within {self._timeout:g} s"

    def _give_up(self, stream: TokenStream, why: str) -> None:
        self._counters.migrations_failed += 1
        log.error("request %s failed after %d tokens: %s", stream.request_id, len(stream.output), why)
        if self._engines.alive(stream.engine_id, stream.incarnation):
            self._dispatch.cancel(stream.engine_id, stream.wire_id)
        stream.end("error", f"The answer broke off: {why}.")


def _finished(stream: TokenStream, max_model_len: int) -> FinishReason | None:
    """Whether the output is complete already and only its last delta was lost with the engine."""
    if stream.output and stream.output[-1] in stream.sampling.stop_token_ids:
        return "stop"
    if len(stream.output) >= stream.sampling.max_tokens:
        return "length"
    if stream.prompt_tokens + len(stream.output) >= max_model_len:
        return "length"
    return None
