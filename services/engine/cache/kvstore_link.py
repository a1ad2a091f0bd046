"""One connection to the kvstore: a non-blocking socket that carries frames and the arena's descriptor."""

import os
import socket

import msgspec

from services.protocol import codec, kv
from services.protocol.frames import FrameReader, frame

CHUNK_BYTES = 256 * 2**10
_DESCRIPTORS = 4
"""Received at most; the store sends one."""


class LinkError(OSError):
    """The other side is gone, or speaks another language."""


class KvLink:
    """Owned by one thread. `close` it in any case."""

    def __init__(self, path: str) -> None:
        """Connects, or raises OSError; never waits."""
        self.descriptor: int | None = None
        """The first descriptor received. Whoever takes it sets None; else `close` closes it."""
        self._frames = FrameReader()
        self._unsent = bytearray()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether `flush` is to be called once the socket takes more."""
        return bool(self._unsent)

    def put(self, call: kv.Call) -> None:
        """Queue a call for `flush`. Raises FrameError, with nothing queued, when it is too large for a frame."""
        self._unsent += frame(call)

    def flush(self) -> None:
        """Send what the socket takes. Raises OSError when the connection is lost."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:sent]

    def receive(self) -> list[kv.Reply]:
        """The replies that arrived, none while there is no complete one. Raises OSError or FrameError when the
        connection is lost or cannot be understood."""
        try:
            chunk, descriptors, _, _ = socket.recv_fds(self._socket, CHUNK_BYTES, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        for descriptor in descriptors:
            if self.descriptor is None:
                self.descriptor = descriptor
            else:
                os.close(descriptor)
        if not chunk:
            raise LinkError("the kvstore closed the connection")
        try:
            return [codec.kv_reply.decode(payload) for payload in self._frames.feed(chunk)]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise LinkError(f"the kvstore sent what is no reply: {error}") from None

    def close(self) -> None:
        self._socket.close()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
