"""One client's connection: reads calls, answers them from the index, in order."""

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

import msgspec
from opentelemetry import trace

from services import telemetry
from services.kvstore.arena import Arena
from services.kvstore.index import BadEntry, Holder, Index
from services.protocol import codec, kv
from services.protocol.frames import FrameError, FrameReader, frame

CHUNK_BYTES = 256 * 2**10

log = logging.getLogger(__name__)
tracer = telemetry.tracer(__name__)


class _Numbered(msgspec.Struct):
    """What can be read of a call that is otherwise unreadable."""

    call: int = 0


_numbered = msgspec.msgpack.Decoder(_Numbered)


class Connection:
    """Serves one socket until it ends; then gives up what the client held.

    The socket is used without a transport, since the arena's descriptor needs `sendmsg`, and since reading only after
    all replies are sent is the backpressure that is wanted here: a client that does not read stalls nobody else.
    """

    def __init__(self, sock: socket.socket, arena: Arena, index: Index, calls: Counter[str], clients: set[str]) -> None:
        """`sock` is non-blocking and ours from now on. `calls` counts by verb; `clients` holds the names of all
        clients that are connected: both are shared by all connections."""
        self._sock = sock
        self._arena = arena
        self._index = index
        self._calls = calls
        self._clients = clients
        self._holder: Holder | None = None

    async def serve(self) -> None:
        """Until the client is gone or sends what cannot be framed. Raises nothing but CancelledError."""
        try:
            await self._serve()
        except (OSError, FrameError) as error:
            log.info("connection of %s closed: %s", self._name, error)
        except Exception:
            log.exception("connection of %s closed", self._name)
        finally:
            self._end()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        reader = FrameReader()
        while chunk := await loop.sock_recv(self._sock, CHUNK_BYTES):
            replies = bytearray()
            try:
                for payload in reader.feed(chunk):
                    reply = self._answer(payload)
                    if isinstance(reply, kv.Welcome):
                        await loop.sock_sendall(self._sock, replies)
                        replies.clear()
                        replies += self._welcome(frame(reply))
                    else:
                        replies += frame(reply)
            except FrameError as error:
                replies += frame(kv.Fault(call=0, message=str(error)))
                await loop.sock_sendall(self._sock, replies)
                raise
            await loop.sock_sendall(self._sock, replies)
            await asyncio.sleep(0)  # sock_recv does not yield while there are bytes: let the others have their turn

    def _welcome(self, message: bytes) -> bytes:
        """Send `message` with the arena's descriptor; returns what of it is left to send. Raises OSError, also when not
        even its first byte can be sent, as only a client that reads no replies brings about."""
        sent = socket.send_fds(self._sock, [message], [self._arena.fd])
        return message[sent:]

    def _end(self) -> None:
        self._sock.close()
        if self._holder is None:
            return
        self._clients.discard(self._holder.name)
        self._index.end(self._holder, time.monotonic())
        # A little late rather than a little early, when nothing would be due.
        asyncio.get_running_loop().call_later(self._index.grace + 0.01, lambda: self._index.settle(time.monotonic()))
        log.info("%s disconnected", self._name)

    @property
    def _name(self) -> str:
        return self._holder.name if self._holder else "an unknown client"

    def _answer(self, payload: bytes) -> kv.Reply:
        try:
            call = codec.kv_call.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return kv.Fault(call=_call_number(payload), message=f"this is no call: {error}")
        self._calls[str(type(call).__struct_config__.tag)] += 1
        try:
            return self._carry_out(call)
        except BadEntry as error:
            return kv.Fault(call=call.call, message=str(error))
        except Exception as error:
            log.exception("%s of %s failed", type(call).__name__, self._name)
            return kv.Fault(call=call.call, message=f"internal error: {error!r}")

    def _carry_out(self, call: kv.Call) -> kv.Reply:
        index, number = self._index, call.call
        if isinstance(call, kv.Hello):
            return self._hello(call)
        if isinstance(call, kv.Stat):
            return self._stat(call)
        holder = self._holder
        if holder is None:
            return kv.Fault(call=number, message="the first call must be hello")
        match call:
            case kv.Lookup():
                return kv.States(call=number, states=index.lookup(call.keys))
            case kv.Lease():
                return self._lease(holder, call)
            case kv.Reserve():
                return self._reserve(holder, call)
            case kv.Commit():
                return kv.Done(call=number, count=index.commit(holder, call.keys, time.monotonic()))
            case kv.Release():
                return kv.Done(call=number, count=index.release(holder, call.lease))
            case kv.Drop():
                return kv.Done(call=number, count=index.drop(holder, call.keys))

    def _hello(self, call: kv.Hello) -> kv.Reply:
        if self._holder is not None:
            return kv.Fault(call=call.call, message="hello was said before")
        self._holder = Holder(name=f"{call.client}#{self._sock.fileno()}", fingerprint=call.fingerprint)
        self._clients.add(self._holder.name)
        log.info("%s connected, fingerprint %s", self._name, call.fingerprint)
        return kv.Welcome(call=call.call, arena_bytes=self._arena.size)

    def _lease(self, holder: Holder, call: kv.Lease) -> kv.Leased:
        with _span("kvstore.lease", call.trace) as span:
            lease, extents = self._index.lease(holder, call.keys, time.monotonic())
            _describe(span, keys=len(call.keys), hits=len(extents), extents=extents)
            return kv.Leased(call=call.call, lease=lease, extents=extents)

    def _reserve(self, holder: Holder, call: kv.Reserve) -> kv.Reserved:
        with _span("kvstore.reserve", call.trace) as span:
            extents, full = self._index.reserve(holder, call.entries, time.monotonic())
            granted = tuple(given for given in extents if given is not None)
            _describe(span, keys=len(call.entries), hits=len(granted), extents=granted)
            return kv.Reserved(call=call.call, extents=extents, full=full)

    def _stat(self, call: kv.Stat) -> kv.StatReply:
        counts = self._index.counts()
        return kv.StatReply(
            call=call.call,
            arena_bytes=counts.arena_bytes,
            used_bytes=counts.used_bytes,
            objects=counts.objects,
            reserved=counts.reserved,
            leased=counts.leased,
            hits=counts.hits,
            misses=counts.misses,
            evictions=counts.evictions,
            clients=tuple(sorted(self._clients)),
        )


def _call_number(payload: bytes) -> int:
    try:
        return _numbered.decode(payload).call
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 0


@contextmanager
def _span(name: str, parent: str) -> Generator[trace.Span]:
    """A span below `parent`; none is recorded for calls that belong to no traced request."""
    if not parent:
        yield trace.INVALID_SPAN
        return
    with tracer.start_as_current_span(name, context=telemetry.context_of(parent)) as span:
        yield span


def _describe(span: trace.Span, *, keys: int, hits: int, extents: tuple[tuple[kv.Extent, ...], ...]) -> None:
    """`hits`: keys that were leased, or entries that got room."""
    if span.is_recording():
        size = sum(extent.length for given in extents for extent in given)
        span.set_attributes({"kvstore.keys": keys, "kvstore.hits": hits, "kvstore.bytes": size})
