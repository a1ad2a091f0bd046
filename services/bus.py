"""The connection to NATS, shared by engine and gateway: it never gives up and never raises into a token path.

nats-py gives three promises less than we need. A connection that the server refuses with `-ERR` (too large a message,
a changed password) is closed for ever; `publish` while disconnected queues stale messages for later; a payload's
headers are not counted against `max_payload`. `Bus` makes a new connection where nats-py gave up, drops what cannot be
sent now (whoever misses it asks again: tokens by Resume, events by a snapshot), and checks the full size beforehand.

All methods belong to one event loop.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from nats import errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from services.settings import SettingsError

log = logging.getLogger(__name__)

Handler = Callable[[Msg], Awaitable[None]]

PENDING_MESSAGES = 1 << 20
PENDING_BYTES = 1 << 30
"""Of one subscription: beyond these nats-py drops. A healthy callback never lets a thousand pile up."""

COMPLAIN_SECONDS = 5.0
"""Between two log lines about the same outage."""


class BusError(Exception):
    """A message could not be delivered or answered."""


class NotConnected(BusError):
    """There is no NATS server just now."""


class NoListener(BusError):
    """Nobody subscribes to the subject of a request."""


class NoReply(BusError):
    """The listener did not answer in time."""


class MessageTooLarge(BusError):
    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the message has {size} bytes, more than the NATS server's max_payload of {limit}")
        self.size = size
        self.limit = limit


@dataclass(slots=True)
class BusCounters:
    """Since the start of the process; read by metrics."""

    slow_consumer_drops: int = 0
    """Messages that nats-py threw away since a subscription's queue was full."""
    dropped_publishes: int = 0
    """Messages not sent since there was no connection."""
    reconnects: int = 0
    errors: int = 0
    """Everything that nats-py reported to its error callback, exceptions of our handlers included."""


class Bus:
    def __init__(self, url: str, name: str, on_connected: Callable[[], None] | None = None) -> None:
        """`name` is shown in the server's monitoring. `on_connected` runs after the first and every later connect.

        Raises SettingsError for a URL that names no server.
        """
        try:
            parts = urlsplit(url)
            port = parts.port or 4222
        except ValueError as error:
            raise SettingsError(f"SAMOVAR_NATS_URL={url!r}: {error}") from None
        if parts.scheme not in ("nats", "tls", "ws", "wss") or not parts.hostname:
            raise SettingsError(f"SAMOVAR_NATS_URL={url!r}: write it like nats://127.0.0.1:4222")
        self._url = url
        self._name = name
        self.address = f"{parts.hostname}:{port}"
        """For messages to people: without user and password."""
        self.counters = BusCounters()
        self._on_connected = on_connected
        self._subscriptions: list[tuple[str, Handler]] = []
        self._client: Client | None = None
        self._run: asyncio.Task[None] | None = None
        self._posts: set[asyncio.Task[Any]] = set()
        self._up = asyncio.Event()
        self._complained = -COMPLAIN_SECONDS

    @property
    def connected(self) -> bool:
        return self._client is not None and self._client.is_connected

    @property
    def max_payload(self) -> int:
        """Bytes that one message may have, as the server said at the last connect (1 MiB before that)."""
        return self._client.max_payload if self._client is not None else 2**20

    def on_connected(self, callback: Callable[[], None]) -> None:
        """Replace the callback that runs after each connect."""
        self._on_connected = callback

    def subscribe(self, subject: str, handler: Handler) -> None:
        """Must be called before `start`. Handlers of one subject run one after the other, in order of arrival."""
        if self._run is not None:
            raise RuntimeError("subscribe before start")
        self._subscriptions.append((subject, handler))

    async def start(self) -> None:
        """Begin to connect, in the background and for ever; returns at once."""
        self._run = asyncio.create_task(self._connect_for_ever(), name="bus")

    async def wait_connected(self) -> None:
        await self._up.wait()

    async def close(self) -> None:
        """Send what is buffered and close. Bounded by 2 s."""
        if self._posts:
            await asyncio.wait(self._posts, timeout=1.0)
        client, self._client = self._client, None
        if client is not None and client.is_connected:
            with contextlib.suppress(errors.Error, OSError):
                await client.flush(timeout=1)
        if self._run is not None:
            self._run.cancel()
            await asyncio.wait([self._run], timeout=1.0)
        self._up.clear()

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> bool:
        """Whether the message was handed to a live connection. Raises MessageTooLarge."""
        client = self._client
        if client is None or not client.is_connected:
            self.counters.dropped_publishes += 1
            return False
        self._check_size(len(data), headers)
        try:
            await client.publish(subject, data, headers=dict(headers) if headers else None)
        except (errors.Error, OSError) as error:
            self.counters.dropped_publishes += 1
            log.debug("publish to %s failed: %s", subject, error)
            return False
        return True

    def post(self, subject: str, data: bytes) -> None:
        """Publish without waiting, from code that cannot await. Small messages only."""
        self.spawn(self.publish(subject, data))

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine beside the caller; an exception of it is logged, and `close` waits for it a little."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._posts.add(task)
        task.add_done_callback(self._spawned_done)

    def _spawned_done(self, task: asyncio.Task[Any]) -> None:
        self._posts.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task failed", exc_info=error)

    async def request(
        self, subject: str, data: bytes, timeout: float, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """The reply's payload. Raises NotConnected, NoListener, NoReply or MessageTooLarge."""
        client = self._client
        if client is None or not client.is_connected:
            raise NotConnected(f"no connection to NATS at {self.address}")
        self._check_size(len(data), headers)
        try:
            reply = await client.request(subject, data, timeout=timeout, headers=dict(headers) if headers else None)
        except errors.NoRespondersError:
            raise NoListener(f"nobody listens on {subject}") from None
        except errors.TimeoutError:
            raise NoReply(f"no reply on {subject} within {timeout:g} s") from None
        except (errors.Error, OSError) as error:
            raise NotConnected(f"NATS at {self.address}: {error}") from None
        return reply.data

    async def respond(self, request: Msg, data: bytes) -> bool:
        """Answer a request that a handler got. Raises MessageTooLarge."""
        return bool(request.reply) and await self.publish(request.reply, data)

    def _check_size(self, size: int, headers: Mapping[str, str] | None) -> None:
        # As on the wire: "NATS/1.0\r\n", "key: value\r\n" each, "\r\n".
        extra = 12 + sum(len(k) + len(v) + 4 for k, v in headers.items()) if headers else 0
        limit = self.max_payload
        if size + extra > limit:
            raise MessageTooLarge(size + extra, limit)

    async def _connect_for_ever(self) -> None:
        while True:
            closed = asyncio.Event()
            client = Client()

            async def on_closed(closed: asyncio.Event = closed) -> None:
                closed.set()

            try:
                await client.connect(
                    self._url,
                    name=self._name,
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.5,  # pyrefly: ignore[bad-argument-type]  (seconds; nats-py's hint says int)
                    connect_timeout=2,
                    # A dead peer (no FIN) is noticed after 3 x 5 s.
                    ping_interval=5,
                    max_outstanding_pings=2,
                    # Without it a publish that waits for a flush when the connection breaks waits for ever.
                    flush_timeout=5.0,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnected,
                    reconnected_cb=self._on_reconnected,
                    closed_cb=on_closed,
                )
                for subject, handler in self._subscriptions:
                    await client.subscribe(
                        subject,
                        cb=handler,
                        pending_msgs_limit=PENDING_MESSAGES,
                        pending_bytes_limit=PENDING_BYTES,
                    )
                # Twice: nats-py writes the PING of a flush ahead of subscriptions that are still in its buffer, so
                # only the second PONG says that the server has them.
                await client.flush()
                await client.flush()
                self._client = client
                log.info("connected to NATS at %s", self.address)
                self._connected()
                await closed.wait()
                log.warning("NATS at %s closed the connection (%s); making a new one", self.address, client.last_error)
                self._client = None
                self._up.clear()
            except (errors.Error, OSError) as error:
                self._complain(error)
            finally:
                with contextlib.suppress(errors.Error, OSError):
                    await client.close()
            await asyncio.sleep(0.5)

    def _connected(self) -> None:
        self._up.set()
        if self._on_connected is not None:
            self._on_connected()

    async def _on_reconnected(self) -> None:
        self.counters.reconnects += 1
        log.info("connected to NATS at %s again", self.address)
        self._connected()

    async def _on_disconnected(self) -> None:
        if self._up.is_set() and self._client is not None:
            log.warning("lost the connection to NATS at %s", self.address)
        self._up.clear()

    async def _on_error(self, error: Exception) -> None:
        self.counters.errors += 1
        if isinstance(error, errors.SlowConsumerError):
            self.counters.slow_consumer_drops += 1
            log.error("a message on %s was dropped: this process does not keep up", error.subject)
        elif isinstance(error, (OSError, errors.Error)):
            self._complain(error)
        else:
            log.error("a NATS handler failed", exc_info=error)

    def _complain(self, error: Exception) -> None:
        now = time.monotonic()
        if now - self._complained >= COMPLAIN_SECONDS:
            self._complained = now
            log.warning("NATS at %s is away, still trying: %s", self.address, error or type(error).__name__)
