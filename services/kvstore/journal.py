"""What of the disk tier is where: an append-only file of records, read back as a whole at start.

A record is MAGIC, the payload's length and CRC-32 (uint32, little-endian), and the payload (msgpack of Put or Forget).
The magic carries the format's version. What lies between two good records is passed over, so that a torn append, a
flipped bit or a lost page costs the records that it hit and no others. A lost Forget is harmless: the bytes it gave
free are another object's then, and that one's record is newer.
"""

import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from errno import ENOSPC
from pathlib import Path

import msgspec
from msgspec import Struct

from services.protocol.kv import Extent, Key

VERSION = 1
MAGIC = b"SKV" + bytes([VERSION])
_FRAME = struct.Struct("<4sII")


class Put(Struct, frozen=True, array_like=True, tag="put"):
    """An object whose bytes are on disk, written and synced before this record was."""

    key: Key
    parent: Key
    fingerprint: str
    length: int
    cost: float
    chance: float
    shared: bool
    used: float
    """Unix seconds of its last use, as far as it was known when this was written."""
    checksum: int
    """CRC-32 of its bytes."""
    extents: tuple[Extent, ...]
    """Of the data file."""


class Forget(Struct, frozen=True, array_like=True, tag="forget"):
    keys: tuple[Key, ...]


Record = Put | Forget

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def framed(record: Record) -> bytes:
    payload = _encoder.encode(record)
    return _FRAME.pack(MAGIC, len(payload), zlib.crc32(payload)) + payload


def scan(content: bytes | mmap.mmap) -> Iterator[Record | None]:
    """The records in order; None for each stretch in which there is no good one."""
    position, size, good = 0, len(content), True
    while position < size:
        record, end = _record_at(content, position)
        if record is not None:
            yield record
            position, good = end, True
            continue
        if good:
            yield None
            good = False
        position = content.find(MAGIC, position + 1)
        if position < 0:
            return


def _record_at(content: bytes | mmap.mmap, position: int) -> tuple[Record | None, int]:
    head = content[position : position + _FRAME.size]
    if len(head) < _FRAME.size:
        return None, position
    magic, length, checksum = _FRAME.unpack(head)
    begin = position + _FRAME.size
    end = begin + length
    if magic != MAGIC or end > len(content):
        return None, position
    payload = content[begin:end]
    if zlib.crc32(payload) != checksum:
        return None, position
    try:
        return _decoder.decode(payload), end
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None, position


class Journal:
    """The file, open for appending. Used by one thread at a time."""

    def __init__(self, path: Path, most: int) -> None:
        """Made if it is missing. `most`: bytes that it may have. Raises OSError."""
        self._path = path
        self._most = most
        self._draft = path.with_suffix(".draft")
        self._draft.unlink(missing_ok=True)  # of a rewrite that was cut off
        self._fd = _open(path)
        self.size = os.fstat(self._fd).st_size

    def records(self) -> Iterator[Record | None]:
        """See `scan`."""
        if self.size == 0:
            return
        with mmap.mmap(self._fd, self.size, prot=mmap.PROT_READ) as content:
            yield from scan(content)

    def append(self, records: Iterable[Record]) -> None:
        """Durable on return. Raises OSError, and then has appended nothing, also where there is no room."""
        content = b"".join(map(framed, records))
        if self.size + len(content) > self._most:
            raise OSError(ENOSPC, "the journal is full")
        try:
            _write_all(self._fd, content, self.size)
            os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self.size)
            raise
        self.size += len(content)

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replace all that was written by `records`, in one step. Raises OSError, and then has changed nothing."""
        fd, size = _open(self._draft), 0
        try:
            piece = bytearray()
            for record in records:
                piece += framed(record)
                if len(piece) > 2**20:
                    _write_all(fd, piece, size)
                    size += len(piece)
                    piece.clear()
            _write_all(fd, piece, size)
            size += len(piece)
            if size > self._most:
                raise OSError(ENOSPC, "the journal is full")
            os.fsync(fd)
            os.rename(self._draft, self._path)
            sync_folder(self._path.parent)
        except OSError:
            os.close(fd)
            self._draft.unlink(missing_ok=True)
            raise
        os.close(self._fd)
        self._fd, self.size = fd, size

    def close(self) -> None:
        os.close(self._fd)


def sync_folder(folder: Path) -> None:
    """Make the names in it durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _write_all(fd: int, content: bytes | bytearray, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
