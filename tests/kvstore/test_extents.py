import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvstore.extents import UNIT, ExtentAllocator, rounded
from services.protocol.kv import Extent


def test_lengths_are_rounded_to_units() -> None:
    assert [rounded(n) for n in (1, UNIT, UNIT + 1)] == [UNIT, UNIT, 2 * UNIT]


def test_an_object_takes_one_extent_where_one_piece_holds_it() -> None:
    allocator = ExtentAllocator(8 * UNIT)
    assert allocator.allocate(2 * UNIT + 1) == (Extent(0, 2 * UNIT + 1),)
    assert allocator.allocate(UNIT) == (Extent(3 * UNIT, UNIT),)
    assert (allocator.used, allocator.free) == (4 * UNIT, 4 * UNIT)


def test_what_is_taken_from_the_beginning_can_be_given_back() -> None:
    taken = (Extent(5 * UNIT, UNIT), Extent(UNIT, 2 * UNIT - 7), Extent(3 * UNIT, 1))
    allocator = ExtentAllocator(8 * UNIT, taken)
    assert (allocator.free, allocator.pieces) == (4 * UNIT, 3)
    assert allocator.allocate(2 * UNIT) == (Extent(6 * UNIT, 2 * UNIT),)
    allocator.release((Extent(6 * UNIT, 2 * UNIT),))
    allocator.release(taken)
    assert allocator.allocate(8 * UNIT) == (Extent(0, 8 * UNIT),)


def test_the_smallest_piece_that_fits_is_taken() -> None:
    allocator = ExtentAllocator(16 * UNIT)
    held = [allocator.allocate(n * UNIT) for n in (4, 1, 2, 1, 8)]
    for index in (0, 2):
        extents = held[index]
        assert extents is not None
        allocator.release(extents)
    assert allocator.allocate(2 * UNIT) == (Extent(5 * UNIT, 2 * UNIT),)


def test_scattered_bytes_are_usable_the_largest_pieces_first() -> None:
    allocator = ExtentAllocator(8 * UNIT)
    held = [allocator.allocate(n * UNIT) for n in (1, 1, 3, 1, 2)]
    for index in (0, 2, 4):
        extents = held[index]
        assert extents is not None
        allocator.release(extents)
    assert allocator.allocate(7 * UNIT) is None
    assert allocator.allocate(5 * UNIT + 10) == (
        Extent(2 * UNIT, 3 * UNIT),
        Extent(6 * UNIT, 2 * UNIT),
        Extent(0, 10),
    )
    assert allocator.free == 0


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 64), st.lists(st.integers(1, 20 * UNIT), max_size=60), st.randoms(use_true_random=False))
def test_no_overlap_exact_accounting_and_full_coalescing(units: int, lengths: list[int], draw: random.Random) -> None:
    allocator = ExtentAllocator(units * UNIT)
    held: list[tuple[Extent, ...]] = []
    for length in lengths:
        if held and draw.random() < 0.4:
            allocator.release(held.pop(draw.randrange(len(held))))
        free = allocator.free
        extents = allocator.allocate(length)
        assert (extents is not None) == (rounded(length) <= free)
        if extents is not None:
            assert sum(extent.length for extent in extents) == length
            held.append(extents)
        taken = sorted((e.offset, e.offset + rounded(e.length)) for extents in held for e in extents)
        assert all(start % UNIT == 0 and 0 <= start < end <= allocator.size for start, end in taken)
        assert all(end <= start for (_, end), (start, _) in pairwise(taken))
        assert allocator.used == sum(end - start for start, end in taken)
        gaps = zip([0, *(end for _, end in taken)], [*(start for start, _ in taken), allocator.size], strict=True)
        assert allocator.pieces == sum(start < end for start, end in gaps)
    for extents in held:
        allocator.release(extents)
    assert (allocator.free, allocator.pieces) == (allocator.size, 1)
    assert allocator.allocate(allocator.size) == (Extent(0, allocator.size),)


@pytest.mark.parametrize("length", [2**20, 2**20 - 1])
def test_blocks_of_one_size_never_fragment(length: int) -> None:
    allocator = ExtentAllocator(64 * 2**20)
    draw = random.Random(1)
    held = [allocator.allocate(length) for _ in range(64)]
    assert allocator.allocate(1) is None
    for _ in range(1000):
        extents = held.pop(draw.randrange(len(held)))
        assert extents is not None
        assert len(extents) == 1
        allocator.release(extents)
        if draw.random() < 0.5 or len(held) < 32:
            held += [allocator.allocate(length) for _ in range(64 - len(held))]
