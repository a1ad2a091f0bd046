"""Bytes from one file's extents to another's, with their checksum. Used on threads; lets go of the GIL."""

import os
import zlib
from collections.abc import Iterator, Sequence
from errno import EIO

from services.protocol.kv import Extent

CHUNK_BYTES = 2**20


def copy(source: int, froms: Sequence[Extent], target: int, tos: Sequence[Extent], buffer: bytearray) -> int:
    """Copy all bytes of `froms` in order into `tos`, whose lengths add up to the same; both are extents of open files.
    Returns the CRC-32 of what was copied. Raises OSError, also where the source is shorter than that.

    Through `buffer`, of CHUNK_BYTES, since the checksum must be of the very bytes that were written.
    """
    checksum = 0
    for begin, end, length in _pieces(froms, tos):
        view = memoryview(buffer)[:length]
        done = 0
        while done < length:
            read = os.preadv(source, [view[done:]], begin + done)
            if read == 0:
                raise OSError(EIO, "the file is shorter than it was")
            done += read
        checksum = zlib.crc32(view, checksum)
        done = 0
        while done < length:
            done += os.pwritev(target, [view[done:]], end + done)
    return checksum


def _pieces(froms: Sequence[Extent], tos: Sequence[Extent]) -> Iterator[tuple[int, int, int]]:
    """(offset there, offset here, bytes) of pieces that lie within one extent on either side."""
    targets = iter(tos)
    offset = room = 0
    for extent in froms:
        begin, left = extent.offset, extent.length
        while left:
            if not room:
                target = next(targets)
                offset, room = target.offset, target.length
            length = min(left, room, CHUNK_BYTES)
            yield begin, offset, length
            begin, left, offset, room = begin + length, left - length, offset + length, room - length
