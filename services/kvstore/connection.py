"""One client's connection: reads calls, answers them from the store, in order but for leases that wait for the disk."""

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress

import msgspec
from opentelemetry import trace

from services import telemetry
from services.kvstore.arena import Arena
from services.kvstore.entries import BadEntry
from services.kvstore.holder import Holder
from services.kvstore.store import Store
from services.protocol import codec, kv
from services.protocol.frames import FrameError, FrameReader, frame

CHUNK_BYTES = 256 * 2**10
MOST_WAITING = 64
"""Leases of one connection that wait for the disk, before no further call is read."""

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

    def __init__(self, sock: socket.socket, arena: Arena, store: Store, calls: Counter[str], clients: set[str]) -> None:
        """`sock` is non-blocking and ours from now on. `calls` counts by verb; `clients` holds the names of all
        clients that are connected: both are shared by all connections."""
        self._sock = sock
        self._arena = arena
        self._store = store
        self._calls = calls
        self._clients = clients
        self._holder: Holder | None = None
        self._waiting: set[asyncio.Task[None]] = set()
        """Leases that wait for the disk."""
        self._sending = asyncio.Lock()

    async def serve(self) -> None:
        """Until the client is gone or sends what cannot be framed. Raises nothing but CancelledError."""
        try:
            await self._serve()
        except (OSError, FrameError) as error:
            log.info("connection of %s closed: %s", self._name, error)
        except Exception:
            log.exception("connection of %s closed", self._name)
        finally:
            try:
                await self._call_off()
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
                        await self._send(replies)
                        replies.clear()
                        replies += self._welcome(frame(reply))
                    elif reply is not None:
                        replies += frame(reply)
            except FrameError as error:
                replies += frame(kv.Fault(call=0, message=str(error)))
                await self._send(replies)
                raise
            await self._send(replies)
            while len(self._waiting) > MOST_WAITING:
                await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # sock_recv does not yield while there are bytes: let the others have their turn

    async def _send(self, replies: bytes | bytearray) -> None:
        async with self._sending:
            await asyncio.get_running_loop().sock_sendall(self._sock, replies)

    def _welcome(self, message: bytes) -> bytes:
        """Send `message` with the arena's descriptor; returns what of it is left to send. Raises OSError, also when not
        even its first byte can be sent, as only a client that reads no replies brings about."""
        sent = socket.send_fds(self._sock, [message], [self._arena.fd])
        return message[sent:]

    async def _call_off(self) -> None:
        """End the leases that wait for the disk: before the socket is closed, which one may just be sending to."""
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)

    def _end(self) -> None:
        self._sock.close()
        if self._holder is None:
            return
        self._clients.discard(self._holder.name)
        self._store.end(self._holder)
        # A little late rather than a little early, when nothing would be due.
        asyncio.get_running_loop().call_later(self._store.grace + 0.01, self._store.settle)
        log.info("%s disconnected", self._name)

    @property
    def _name(self) -> str:
        return self._holder.name if self._holder else "an unknown client"

    def _answer(self, payload: bytes) -> kv.Reply | None:
        """None: the reply comes later."""
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

    def _carry_out(self, call: kv.Call) -> kv.Reply | None:
        store, number = self._store, call.call
        if isinstance(call, kv.Hello):
            return self._hello(call)
        if isinstance(call, kv.Stat):
            return self._stat(call)
        holder = self._holder
        if holder is None:
            return kv.Fault(call=number, message="the first call must be hello")
        match call:
            case kv.Lookup():
                return kv.States(call=number, states=store.lookup(holder, call.keys))
            case kv.Lease():
                return self._lease(holder, call)
            case kv.Reserve():
                return self._reserve(holder, call)
            case kv.Commit():
                return kv.Done(call=number, count=store.commit(holder, call.keys))
            case kv.Release():
                return kv.Done(call=number, count=store.release(holder, call.lease))
            case kv.Drop():
                return kv.Done(call=number, count=store.drop(holder, call.keys))
            case kv.Weigh():
                return kv.Done(call=number, count=store.weigh(call.keys, call.chance))

    def _hello(self, call: kv.Hello) -> kv.Reply:
        if self._holder is not None:
            return kv.Fault(call=call.call, message="hello was said before")
        self._holder = Holder(name=f"{call.client}#{self._sock.fileno()}", fingerprint=call.fingerprint)
        self._clients.add(self._holder.name)
        log.info("%s connected, fingerprint %s", self._name, call.fingerprint)
        return kv.Welcome(call=call.call, arena_bytes=self._arena.size)

    def _lease(self, holder: Holder, call: kv.Lease) -> kv.Leased | None:
        if self._store.waits_for_disk(holder, call.keys):
            task = asyncio.create_task(self._lease_from_disk(holder, call))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)
            return None
        with _span("kvstore.lease", call.trace) as span:
            lease, extents = self._store.lease(holder, call.keys)
            _describe(span, keys=len(call.keys), hits=len(extents), extents=extents)
            return kv.Leased(call=call.call, lease=lease, extents=extents)

    async def _lease_from_disk(self, holder: Holder, call: kv.Lease) -> None:
        with _span("kvstore.lease", call.trace) as span:
            try:
                lease, extents, read = await self._store.lease_from_disk(holder, call.keys)
                _describe(span, keys=len(call.keys), hits=len(extents), extents=extents)
                span.set_attribute("kvstore.from_disk", len(read))
                message = frame(kv.Leased(call=call.call, lease=lease, extents=extents, from_disk=read))
            except Exception as error:
                log.exception("Lease of %s failed", self._name)
                message = frame(kv.Fault(call=call.call, message=f"internal error: {error!r}"))
        with suppress(OSError):  # then `serve` ends the connection, and the lease with it
            await self._send(message)

    def _reserve(self, holder: Holder, call: kv.Reserve) -> kv.Reserved:
        with _span("kvstore.reserve", call.trace) as span:
            extents, full = self._store.reserve(holder, call.entries)
            granted = tuple(given for given in extents if given is not None)
            _describe(span, keys=len(call.entries), hits=len(granted), extents=granted)
            return kv.Reserved(call=call.call, extents=extents, full=full)

    def _stat(self, call: kv.Stat) -> kv.StatReply:
        counts, disk = self._store.counts(), self._store.disk_counts()
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
            disk_bytes=disk.disk_bytes if disk else 0,
            disk_used_bytes=disk.used_bytes if disk else 0,
            disk_objects=disk.objects if disk else 0,
            spilled=disk.spilled if disk else 0,
            reloaded=disk.reloaded if disk else 0,
            torn=disk.torn if disk else 0,
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
