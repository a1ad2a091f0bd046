"""The engine's side of the kvstore: calls that never wait, answers that always come."""

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from services.engine.cache.arena import Arena
from services.engine.cache.kv_client import Goal
from services.engine.cache.kvstore_link import KvLink, LinkError
from services.engine.mailbox import KvAnswer, KvConnected, KvLeased, KvReserved
from services.protocol import kv
from services.protocol.frames import FrameError

VERSION = 1
"""Of the store's protocol that we speak."""
FIRST_RETRY = 0.1
LAST_RETRY = 2.0
"""Seconds between attempts to connect, doubling from the first to the last."""
STALL = 5.0
"""Seconds without any answer after which an open connection counts as lost: the store's process is stopped. At half of
them it is asked whether it is alive, for a lease may wait longer for the store's disk."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Lease:
    tag: int
    keys: tuple[kv.Key, ...]
    trace: str
    goal: int = -1


@dataclass(frozen=True, slots=True)
class _Find:
    """Asked as a Lookup, and then as a Lease of what is there."""

    tag: int
    keys: tuple[kv.Key, ...]
    goals: tuple[Goal, ...]
    trace: str

    @property
    def asked(self) -> tuple[kv.Key, ...]:
        return (*self.keys, *(goal.key for goal in self.goals if goal.key))

    def lease(self, states: Sequence[kv.KeyState]) -> _Lease | None:
        """Of the first goal that the store has; `states` of `asked`."""
        hit = {key for key, state in zip(self.asked, states, strict=True) if state == "hit"}
        reach = next((index for index, key in enumerate(self.keys) if key not in hit), len(self.keys))
        for index, goal in enumerate(self.goals):
            if goal.keys <= reach and (not goal.key or goal.key in hit):
                keys = self.keys[: goal.keys] + ((goal.key,) if goal.key else ())
                return _Lease(self.tag, keys, self.trace, index)
        return None


@dataclass(frozen=True, slots=True)
class _Reserve:
    tag: int
    entries: tuple[kv.Entry, ...]
    trace: str


@dataclass(frozen=True, slots=True)
class _Commit:
    keys: tuple[kv.Key, ...]


@dataclass(frozen=True, slots=True)
class _Drop:
    keys: tuple[kv.Key, ...]


@dataclass(frozen=True, slots=True)
class _Release:
    lease: int


@dataclass(frozen=True, slots=True)
class _Weigh:
    keys: tuple[kv.Key, ...]
    chance: float


@dataclass(frozen=True, slots=True)
class _Ping:
    """A Stat whose answer shows that the store is alive while a lease waits for its disk."""


_Call = _Lease | _Find | _Reserve | _Commit | _Drop | _Release | _Weigh | _Ping


@dataclass(slots=True)
class _Session:
    """What is known of one connection, from dialling to its loss."""

    link: KvLink
    heard: float
    """When the store last said something, or began to owe us an answer."""
    arena: Arena | None = None
    """None until the store has welcomed us."""
    owed: dict[int, _Call | None] = field(default_factory=dict)
    """Calls without answer, by number; None is Hello."""
    leases: dict[int, int] = field(default_factory=dict)
    """The store's lease by ours."""
    pinged: bool = False
    """A Ping is owed."""


class KvClient:
    """A connection to the kvstore that is made again whenever it is lost, by one thread.

    `lease`, `find` and `reserve` are answered exactly once each by `deliver`, in whatever state the store is: by an
    empty answer when it is away, dies or stalls. Nothing here raises or waits; every method may be called from any
    thread.

    What an earlier connection gave is void. Its leases may be released (a no-op). Its reservations must not be
    committed or dropped: the same keys may be reserved anew, and not yet written. And bytes read under its leases may
    be another object's once it was lost: whoever copies takes them only if, when the copy is done, `client.arena` is
    still the arena that came with the lease.
    """

    def __init__(
        self,
        socket_path: str,
        client: str,
        fingerprint: str,
        deliver: Callable[[KvAnswer], None],
        *,
        stall: float = STALL,
    ) -> None:
        """`deliver` is called on the client's thread (after `close`, on the caller's), must not raise and should only
        hand the answer over. `client` is the name shown in the store's log."""
        self._path = socket_path
        self._name = client
        self._fingerprint = fingerprint
        self._deliver = deliver
        self._stall = stall
        self._lock = threading.Lock()
        """Guards `_calls`, `_closing`, `_ended` and writing to `_wake`."""
        self._calls: deque[_Call] = deque()
        self._closing = False
        self._ended = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kvstore-client", daemon=True)
        # Below: the thread's own, but for reading `_arena`.
        self._arena: Arena | None = None
        self._session: _Session | None = None
        self._numbers = count(1)
        self._handles = count(1)
        self._retry_at = 0.0
        self._retry_after = FIRST_RETRY
        self._complaint = ""

    @property
    def arena(self) -> Arena | None:
        """That of the present connection; None while there is none."""
        return self._arena

    @property
    def connected(self) -> bool:
        return self._arena is not None

    def start(self) -> None:
        """Connect, and go on trying. Returns at once; `deliver` is told by KvConnected. Calls made before that are
        answered as if the store were away."""
        self._thread.start()

    def close(self) -> None:
        """Send what is queued as far as the store takes it at once, answer what is open, end the thread."""
        with self._lock:
            self._closing = True
            if not self._ended:
                os.eventfd_write(self._wake, 1)
        if self._thread.is_alive():
            self._thread.join()
        else:
            self._end()

    def lease(self, tag: int, keys: Sequence[kv.Key], trace: str = "") -> None:
        """Pin the longest prefix of `keys` that the store has. Answered by KvLeased; its `lease`, if not 0, is to be
        released."""
        self._submit(_Lease(tag, tuple(keys), trace))

    def find(self, tag: int, keys: Sequence[kv.Key], goals: Sequence[Goal], trace: str = "") -> None:
        """Pin the first of `goals` that the store has whole. Answered by KvLeased, with its index; where it was given
        up between being found and being pinned, only a part of it is pinned."""
        self._submit(_Find(tag, tuple(keys), tuple(goals), trace))

    def reserve(self, tag: int, entries: Sequence[kv.Entry], trace: str = "") -> None:
        """Ask for room for `entries`. Answered by KvReserved; what it gives room for is to be committed or dropped."""
        self._submit(_Reserve(tag, tuple(entries), trace))

    def commit(self, keys: Sequence[kv.Key]) -> None:
        """The bytes of these objects, reserved on this connection, are written."""
        self._submit(_Commit(tuple(keys)))

    def release(self, lease: int) -> None:
        """Give a lease back: one of KvLeased, from whatever connection."""
        self._submit(_Release(lease))

    def drop(self, keys: Sequence[kv.Key]) -> None:
        """Forget objects, or give up reservations: no copy to their extents may be under way. Without keys, nothing."""
        if keys:
            self._submit(_Drop(tuple(keys)))

    def weigh(self, keys: Sequence[kv.Key], chance: float) -> None:
        """The contexts that end with `keys` are asked for again with this chance. Without keys, nothing."""
        if keys:
            self._submit(_Weigh(tuple(keys), chance))

    def _submit(self, call: _Call) -> None:
        with self._lock:
            if not self._ended:
                self._calls.append(call)
                os.eventfd_write(self._wake, 1)
                return
        self._answer_empty(call)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._dial()
                self._wait()
                self._work()
            self._work()
        finally:  # also should there be a bug here: a request that waits for its answer would wait for ever
            self._end()

    def _dial(self) -> None:
        """Begin a connection if there is none and it is time to try."""
        now = time.monotonic()
        if self._session is not None or now < self._retry_at:
            return
        try:
            link = KvLink(self._path)
        except OSError as error:
            self._lose(f"cannot connect to {self._path}: {error}")
            return
        self._session = _Session(link, heard=now)
        number = next(self._numbers)
        link.put(kv.Hello(call=number, client=self._name, fingerprint=self._fingerprint))
        self._session.owed[number] = None

    def _wait(self) -> None:
        """Until there is a call or an answer, the socket takes more, or a deadline has come."""
        session, poll, deadline = self._session, select.poll(), None
        poll.register(self._wake, select.POLLIN)
        if session is None:
            deadline = self._retry_at
        else:
            poll.register(session.link, select.POLLIN | (select.POLLOUT if session.link.wants_write else 0))
            if session.owed:
                deadline = session.heard + (self._stall if session.pinged else self._stall / 2)
        poll.poll(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000 + 1)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _work(self) -> None:
        """Send the calls that were made, hand over the answers that came, notice that the connection is lost."""
        try:
            if self._session is not None:
                self._receive(self._session)
            while self._calls:
                self._send(self._calls.popleft())
            if self._session is not None:
                self._session.link.flush()
        except (OSError, FrameError) as error:
            self._lose(str(error))

    def _receive(self, session: _Session) -> None:
        """Raises OSError or FrameError when the connection is lost or of no use."""
        now = time.monotonic()
        if replies := session.link.receive():
            session.heard = now
        for reply in replies:
            self._take(session, reply)
        if session.owed and now >= session.heard + self._stall:
            raise LinkError(f"the kvstore did not answer for {self._stall:.1f} s")
        if session.owed and not session.pinged and now >= session.heard + self._stall / 2:
            session.pinged = True
            self._send(_Ping())

    def _send(self, call: _Call) -> None:
        """Queue a call on the connection, or answer it at once where there is none."""
        session = self._session
        if session is None or session.arena is None:
            self._answer_empty(call)
            return
        number = next(self._numbers)
        match call:
            case _Lease(_, keys, trace):
                message: kv.Call = kv.Lease(call=number, keys=keys, trace=trace)
            case _Find():
                message = kv.Lookup(call=number, keys=call.asked)
            case _Reserve(_, entries, trace):
                message = kv.Reserve(call=number, entries=entries, trace=trace)
            case _Commit(keys):
                message = kv.Commit(call=number, keys=keys)
            case _Drop(keys):
                message = kv.Drop(call=number, keys=keys)
            case _Weigh(keys, chance):
                message = kv.Weigh(call=number, keys=keys, chance=chance)
            case _Ping():
                message = kv.Stat(call=number)
            case _Release(lease):
                if lease not in session.leases:
                    return
                message = kv.Release(call=number, lease=session.leases.pop(lease))
        try:
            session.link.put(message)
        except FrameError as error:
            log.warning("a call is answered as a miss: %s", error)
            self._answer_empty(call)
            return
        if not session.owed:
            session.heard = time.monotonic()
        session.owed[number] = call

    def _take(self, session: _Session, reply: kv.Reply) -> None:
        """Hand over the answer to one of our calls. Raises LinkError when it is no answer to it."""
        if reply.call not in session.owed:
            detail = f": {reply.message}" if isinstance(reply, kv.Fault) else ""
            raise LinkError(f"the kvstore answered what was not asked{detail}")
        call = session.owed[reply.call]
        match call, reply:
            case None, kv.Welcome():
                self._welcome(session, reply)
            case None, kv.Fault():
                raise LinkError(f"the kvstore refuses us: {reply.message}")
            case _Lease(), kv.Leased() if len(reply.extents) <= len(call.keys):
                lease = 0
                if reply.lease:
                    lease = next(self._handles)
                    session.leases[lease] = reply.lease
                self._deliver(KvLeased(call.tag, session.arena, lease, reply.extents, reply.from_disk, call.goal))
            case _Find(), kv.States() if len(reply.states) == len(call.asked):
                found = call.lease(reply.states)
                if found is None or not found.keys:
                    goal = -1 if found is None else found.goal
                    self._deliver(KvLeased(call.tag, session.arena, 0, (), goal=goal))
                else:
                    self._send(found)
            case _Reserve(), kv.Reserved() if len(reply.extents) == len(call.entries):
                self._deliver(KvReserved(call.tag, session.arena, reply.extents, reply.full))
            case ((_Commit() | _Drop() | _Release() | _Weigh()), kv.Done()):
                pass
            case _Ping(), kv.StatReply():
                session.pinged = False
            case _, kv.Fault():
                log.warning("the kvstore refused a call: %s", reply.message)
                self._answer_empty(call)
            case _:
                raise LinkError(f"the kvstore answered with {type(reply).__name__} what was none")
        del session.owed[reply.call]

    def _welcome(self, session: _Session, reply: kv.Welcome) -> None:
        if reply.version != VERSION:
            raise LinkError(f"the kvstore speaks version {reply.version}, this engine version {VERSION}")
        descriptor, session.link.descriptor = session.link.descriptor, None
        if descriptor is None:
            raise LinkError("the kvstore sent no arena")
        try:
            session.arena = Arena(descriptor, reply.arena_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise LinkError(f"the kvstore's arena of {reply.arena_bytes} bytes cannot be mapped: {error}") from None
        self._arena = session.arena
        self._complaint = ""
        self._retry_after = FIRST_RETRY
        log.info("connected to the kvstore at %s, arena of %d MiB", self._path, reply.arena_bytes // 2**20)
        self._deliver(KvConnected(session.arena))

    def _lose(self, reason: str) -> None:
        """End the connection, answer what it owed, try again later. One log line a reason until the next success."""
        if reason != self._complaint:
            self._complaint = reason
            log.warning("no kvstore, all its answers are misses until it is back: %s", reason)
        session, self._session, self._arena = self._session, None, None
        self._retry_at = time.monotonic() + self._retry_after
        self._retry_after = min(2 * self._retry_after, LAST_RETRY)
        if session is not None:
            session.link.close()
            for call in session.owed.values():
                self._answer_empty(call)

    def _answer_empty(self, call: _Call | None) -> None:
        match call:
            case _Lease(tag) | _Find(tag):
                self._deliver(KvLeased(tag, None, 0, ()))
            case _Reserve(tag, entries):
                self._deliver(KvReserved(tag, None, (None,) * len(entries)))

    def _end(self) -> None:
        """Answer all that is open, now and from now on."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            os.close(self._wake)
        session, self._session, self._arena = self._session, None, None
        if session is not None:
            session.link.close()
            for call in session.owed.values():
                self._answer_empty(call)
        while self._calls:
            self._answer_empty(self._calls.popleft())
