"""Which bytes of the arena are free: an allocator of extents."""

from bisect import bisect_left, insort
from collections.abc import Sequence

from services.protocol.kv import Extent

UNIT = 4096
"""Bytes. Offsets and sizes of extents are multiples of it (a memory page: what can be registered for DMA)."""


def rounded(length: int) -> int:
    """The bytes of the arena that `length` bytes occupy."""
    return -(-length // UNIT) * UNIT


class ExtentAllocator:
    """Best fit with coalescing. What no single free piece can hold is put together of several, the largest first, so
    that free bytes are always usable however fragmented they are.

    Costs a binary search and a list insertion an extent. Not thread-safe.
    """

    def __init__(self, size: int, taken: Sequence[Extent] = ()) -> None:
        """`size` is a positive multiple of UNIT; `taken` is not free from the beginning, and does not overlap."""
        self.size = size
        self.free = 0
        """Free bytes."""
        self._by_size: list[tuple[int, int]] = []
        """(length, offset) of every free piece, sorted."""
        self._by_start: dict[int, int] = {}
        """Offset -> length of every free piece."""
        self._by_end: dict[int, int] = {}
        """End -> offset of every free piece."""
        begin = 0
        for offset, length in [*sorted((extent.offset, extent.length) for extent in taken), (size, 0)]:
            if offset > begin:
                self.free += offset - begin
                self._by_size.append((offset - begin, begin))
                self._by_start[begin] = offset - begin
                self._by_end[offset] = begin
            begin = offset + rounded(length)
        self._by_size.sort()

    @property
    def used(self) -> int:
        return self.size - self.free

    @property
    def pieces(self) -> int:
        """How many pieces the free bytes are in."""
        return len(self._by_size)

    def allocate(self, length: int) -> tuple[Extent, ...] | None:
        """Extents whose lengths add up to `length` (> 0 bytes), or None when less than that is free.

        Only the last extent's length may be no multiple of UNIT; the rest of its last unit is taken all the same.
        """
        missing = rounded(length)
        if missing > self.free:
            return None
        padding = missing - length
        extents: list[Extent] = []
        while missing:
            fit = bisect_left(self._by_size, (missing, 0))
            size, offset = self._by_size[min(fit, len(self._by_size) - 1)]
            self._remove(offset, size)
            taken = min(size, missing)
            if size > taken:
                self._insert(offset + taken, size - taken)
            missing -= taken
            extents.append(Extent(offset, taken if missing else taken - padding))
        self.free -= length + padding
        return tuple(extents)

    def release(self, extents: tuple[Extent, ...]) -> None:
        """Take back what `allocate` gave."""
        for extent in extents:
            offset, size = extent.offset, rounded(extent.length)
            self.free += size
            before = self._by_end.get(offset)
            if before is not None:
                length = self._by_start[before]
                self._remove(before, length)
                offset, size = before, length + size
            behind = self._by_start.get(offset + size)
            if behind is not None:
                self._remove(offset + size, behind)
                size += behind
            self._insert(offset, size)

    def _insert(self, offset: int, size: int) -> None:
        insort(self._by_size, (size, offset))
        self._by_start[offset] = size
        self._by_end[offset + size] = offset

    def _remove(self, offset: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, offset))]
        del self._by_start[offset]
        del self._by_end[offset + size]
