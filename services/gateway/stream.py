"""Answers on their way to a client, as plain ASGI responses that notice when the client leaves.

Litestar's own streams do not clean up after a disconnect (litestar#3772), and its server-sent events cost a third of
the throughput; so both responses here speak ASGI themselves. Beside the task that sends, a watcher waits for
`http.disconnect` and stops the engine at once, in queue, prefill or decode.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator

from litestar.types import Receive, Scope, Send

from services.gateway.errors import ApiError
from services.gateway.openai.chat_response import DONE, ChatResponse, chat_finish
from services.gateway.output.answer import Answer
from services.gateway.output.pieces import Piece

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
    """200 and headers at once, then server-sent events as they come. ASGI; for one use."""

    def __init__(self, answer: Answer, response: ChatResponse, open_answers: OpenAnswers, keepalive: float) -> None:
        """`keepalive`: seconds without an event after which one without content is sent."""
        self._answer = answer
        self._response = response
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
        answer, response = self._answer, self._response
        clock = asyncio.get_running_loop().time
        head = response.role
        due = clock() + self._keepalive
        while True:
            try:
                async with asyncio.timeout_at(due):
                    delta = await answer.next()
            except TimeoutError:
                await _send(send, response.keepalive)
                due = clock() + self._keepalive
                continue
            event = head + response.pieces(delta.pieces) if delta.pieces else b""
            if delta.finish is not None:
                break
            if event and not answer.abandoned:
                await _send(send, event)
                head = b""
                due = clock() + self._keepalive
        if answer.abandoned:
            return b""
        if delta.error is not None:
            return event + response.error(delta.error)
        event = (event or head) + response.finish(chat_finish(delta.finish, answer.calls))
        if not response.include_usage:
            return event + DONE
        # A stop string is found before the engine has counted: the end of the text need not wait for that.
        await _send(send, event)
        return response.usage(await answer.usage(), answer.reasoning_tokens) + DONE


class WholeAnswer:
    """One JSON object when the answer is complete. ASGI; for one use."""

    def __init__(self, answer: Answer, response: ChatResponse, open_answers: OpenAnswers) -> None:
        self._answer = answer
        self._response = response
        self._open = open_answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer
        status = 200
        with self._open.holding(answer):
            try:
                async with _watched(receive, answer):
                    error, body = await self._collect()
                if error is not None:
                    status = error.status
                if not answer.abandoned:
                    await self._send_whole(send, status, body, error)
            except OSError:
                answer.abandon()
            finally:
                answer.close(status)

    async def _collect(self) -> tuple[ApiError | None, bytes]:
        answer = self._answer
        pieces: list[Piece] = []
        while True:
            delta = await answer.next()
            pieces += delta.pieces
            if delta.finish is not None:
                break
        if delta.error is not None:
            return delta.error, delta.error.body()
        usage = await answer.usage()
        finish = chat_finish(delta.finish, answer.calls)
        return None, self._response.whole(pieces, finish, usage, answer.reasoning_tokens)

    async def _send_whole(self, send: Send, status: int, body: bytes, error: ApiError | None) -> None:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self._answer.ledger.request_id.encode()),
        ]
        if error is not None:
            headers += [(name.encode(), value.encode()) for name, value in error.headers().items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await _send(send, body, more=False)


async def _send(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
