"""Answers on their way to a client, as plain ASGI responses that notice when the client leaves.

Litestar's own streams do not clean up after a disconnect (litestar#3772), and its server-sent events cost a third of
the throughput; so both responses here speak ASGI themselves. Beside the task that sends, a watcher waits for
`http.disconnect` and stops the engine at once, in queue, prefill or decode.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator

from litestar.types import Receive, Scope, Send

from services.gateway.output.answer import Answer
from services.gateway.output.pieces import Piece, without_broken_call
from services.gateway.reminder import Reminder
from services.gateway.renderer import Cost, Ending, Renderer
from services.protocol.generate import FinishReason

SHUTTING_DOWN = "The server is shutting down."

_ENDING_SECONDS = 1.0
"""For the last bytes of answers that were ended: a client that does not read may block them."""


class OpenAnswers:
    """All answers under way, and whether new ones are taken. On the event loop's thread."""

    def __init__(self) -> None:
        self.draining = False
        self._open: set[Answer] = set()
        self._none = asyncio.Event()
        self._none.set()

    def __len__(self) -> int:
        return len(self._open)

    @contextlib.contextmanager
    def holding(self, answer: Answer) -> Generator[None, None, None]:
        """Count `answer` as open while the block runs."""
        self._open.add(answer)
        self._none.clear()
        try:
            yield
        finally:
            self._open.discard(answer)
            if not self._open:
                self._none.set()

    async def closed(self, timeout: float) -> bool:
        """Wait until none is open; False when that takes longer than `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._none.wait()
        return not self._open

    async def drain(self, timeout: float) -> None:
        """Take no more, give the open ones `timeout` seconds to finish, then end them with an error."""
        self.draining = True
        if not await self.closed(timeout):
            self.end_all()
            await self.closed(_ENDING_SECONDS)

    def end_all(self) -> None:
        for answer in list(self._open):
            answer.end(SHUTTING_DOWN)


async def _watch(receive: Receive, answer: Answer) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.abandon()


@contextlib.asynccontextmanager
async def _watched(receive: Receive, answer: Answer) -> AsyncGenerator[None, None]:
    """Stop the engine when the client leaves during the block."""
    watcher = asyncio.create_task(_watch(receive, answer))
    try:
        yield
    finally:
        watcher.cancel()


class EventStream:
    """200, headers and the renderer's opening at once, then server-sent events as they come. ASGI; for one use."""

    def __init__(self, answer: Answer, renderer: Renderer, open_answers: OpenAnswers, keepalive: float) -> None:
        """`keepalive`: seconds without an event after which one without content is sent."""
        self._answer = answer
        self._renderer = renderer
        self._open = open_answers
        self._keepalive = keepalive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer
        with self._open.holding(answer):
            try:
                await send(
                    {
                        "type": "http.response.start",
                        "status": 200,
                        "headers": [
                            (b"content-type", b"text/event-stream; charset=utf-8"),
                            (b"cache-control", b"no-cache"),
                            # nginx would collect events otherwise.
                            (b"x-accel-buffering", b"no"),
                            (b"x-request-id", answer.ledger.request_id.encode()),
                        ],
                    }
                )
                async with _watched(receive, answer):
                    if self._renderer.opening:
                        await _send(send, self._renderer.opening)
                    last = await self._send_events(send)
                if not answer.abandoned:
                    await _send(send, last, more=False)
                await answer.usage()
            except OSError:  # a server's way to say on `send` that the client has left
                answer.abandon()
            finally:
                answer.close(200)

    async def _send_events(self, send: Send) -> bytes:
        """All events but the last ones, which are returned: they go out when nobody waits for a disconnect any more,
        since the server reports the end of the response as one."""
        reminder = Reminder(self._keepalive, self._answer.wake)
        try:
            return await self._until_the_end(send, reminder)
        finally:
            reminder.close()

    async def _until_the_end(self, send: Send, reminder: Reminder) -> bytes:
        answer, renderer = self._answer, self._renderer
        led = False
        while True:
            delta = await answer.next()
            event = renderer.pieces(delta.pieces)
            if event and not led:
                event = renderer.lead(answer.cached_tokens) + event
                led = True
            if delta.finish is not None:
                break
            if not event and reminder.due:
                event = renderer.keepalive()
            if event and not answer.abandoned:
                await _send(send, event)
                reminder.said()
        if answer.abandoned:
            return b""
        if delta.error is not None:
            return event + renderer.error(delta.error)
        if not led:
            event = renderer.lead(answer.cached_tokens)
        event += renderer.finish(_ending(answer, delta.finish))
        if not renderer.waits_for_usage:
            return event + renderer.closing(None)
        # A stop string is found before the engine has counted: the end of the text need not wait for that.
        await _send(send, event)
        return renderer.closing(await _cost(answer))


class WholeAnswer:
    """One JSON object when the answer is complete. ASGI; for one use."""

    def __init__(self, answer: Answer, renderer: Renderer, open_answers: OpenAnswers) -> None:
        self._answer = answer
        self._renderer = renderer
        self._open = open_answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer
        status = 200
        with self._open.holding(answer):
            try:
                async with _watched(receive, answer):
                    status, body, headers = await self._collect()
                if not answer.abandoned:
                    await self._send_whole(send, status, body, headers)
            except OSError:
                answer.abandon()
            finally:
                answer.close(status)

    async def _collect(self) -> tuple[int, bytes, dict[str, str]]:
        """Status, body, and headers of an error."""
        answer = self._answer
        pieces: list[Piece] = []
        while True:
            delta = await answer.next()
            pieces += delta.pieces
            if delta.finish is not None:
                break
        if delta.error is not None:
            status, body = self._renderer.failure(delta.error)
            return status, body, delta.error.headers()
        ending = _ending(answer, delta.finish)
        return 200, self._renderer.whole(without_broken_call(pieces), ending, await _cost(answer)), {}

    async def _send_whole(self, send: Send, status: int, body: bytes, more: dict[str, str]) -> None:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self._answer.ledger.request_id.encode()),
        ]
        headers += [(name.encode(), value.encode()) for name, value in more.items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await _send(send, body, more=False)


async def _send(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _ending(answer: Answer, reason: FinishReason) -> Ending:
    return Ending(reason, answer.calls, answer.stop_string)


async def _cost(answer: Answer) -> Cost:
    usage = await answer.usage()
    return Cost(usage, answer.reasoning_tokens, answer.ledger.explain(usage))
