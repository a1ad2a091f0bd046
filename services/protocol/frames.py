"""Length-prefixed msgpack frames on a byte stream, as services.protocol.kv defines them (store and client share it)."""

from collections.abc import Iterator

from services.protocol import codec, kv

HEADER_BYTES = 4


class FrameError(ValueError):
    """A frame over `kv.MAX_FRAME`. The stream cannot be read any further: close it."""


def frame(message: kv.Call | kv.Reply) -> bytes:
    """Header and payload of one message. Raises FrameError when it is too large to send."""
    payload = codec.encode(message)
    if len(payload) > kv.MAX_FRAME:
        raise FrameError(f"a frame of {len(payload)} bytes is over the limit of {kv.MAX_FRAME}")
    return len(payload).to_bytes(HEADER_BYTES, "little") + payload


class FrameReader:
    """Cuts what arrives on one stream into payloads, whatever the chunks are. Keeps at most one frame and one chunk."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The payloads that `chunk` completes, in order: use all of them before the next call.

        Raises FrameError behind the last good one as soon as a header announces too much, so that nobody can make us
        buffer it.
        """
        self._buffer += chunk
        while len(self._buffer) >= HEADER_BYTES:
            length = int.from_bytes(self._buffer[:HEADER_BYTES], "little")
            if length > kv.MAX_FRAME:
                raise FrameError(f"a frame of {length} bytes is over the limit of {kv.MAX_FRAME}")
            end = HEADER_BYTES + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[HEADER_BYTES:end])
            del self._buffer[:end]
            yield payload
