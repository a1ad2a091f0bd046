import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.cache.block_pool import Block, BlockPool


def block(chain: str, depth: int) -> Block:
    return Block(f"{chain}{depth}".encode(), f"{chain}{depth - 1}".encode() if depth else b"", depth)


def cached_chain(pool: BlockPool, chain: str, length: int) -> list[int]:
    pages = pool.allocate(length)
    for depth, page in enumerate(pages):
        assert pool.name(page, block(chain, depth))
    pool.release(pages)
    return pages


def test_pages_are_given_once_and_come_back() -> None:
    pool = BlockPool(4)
    pages = pool.allocate(4)
    assert sorted(pages) == [0, 1, 2, 3]
    assert pool.available == 0
    with pytest.raises(ValueError, match="1 pages wanted, 0 available"):
        pool.allocate(1)
    pool.release(pages)
    assert pool.available == 4
    pool.check_integrity()


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        BlockPool(0)


def test_a_named_page_stays_until_its_page_is_needed() -> None:
    pool = BlockPool(2)
    (page,) = cached_chain(pool, "a", 1)
    assert pool.find(b"a0") == page
    assert pool.available == 2
    assert page not in pool.allocate(1), "a free page is taken before a cached one"
    assert pool.allocate(1) == [page]
    assert pool.find(b"a0") is None
    assert pool.evictions == 1


def test_a_held_page_is_not_evicted() -> None:
    pool = BlockPool(3)
    pages = cached_chain(pool, "a", 3)
    pool.acquire(pages[:2])
    assert pool.allocate(1) == [pages[2]]
    assert pool.available == 0


def test_a_chain_is_evicted_from_its_end() -> None:
    pool = BlockPool(5)
    cached_chain(pool, "a", 5)
    pool.take_changes()
    gone = []
    for _ in range(5):
        pool.allocate(1)
        gone += pool.take_changes()[1]
    assert gone == [b"a4", b"a3", b"a2", b"a1", b"a0"]


def test_the_chain_used_longest_ago_goes_first_and_a_shared_trunk_last() -> None:
    pool = BlockPool(6)
    trunk = cached_chain(pool, "a", 2)
    cached_chain(pool, "b", 2)
    pool.acquire(trunk)
    (leaf,) = pool.allocate(1)
    pool.name(leaf, Block(b"c2", b"a1", 2))
    pool.release([*trunk, leaf])
    pool.take_changes()
    gone = []
    pool.allocate(1)  # the one free page
    for _ in range(5):
        pool.allocate(1)
        gone += pool.take_changes()[1]
    assert gone == [b"b1", b"b0", b"c2", b"a1", b"a0"]


def test_a_transfers_hold_does_not_count_as_use() -> None:
    pool = BlockPool(2)
    (old,) = cached_chain(pool, "a", 1)
    cached_chain(pool, "b", 1)
    pool.acquire([old])
    pool.release([old], used=False)
    pool.allocate(1)
    assert pool.find(b"a0") is None
    assert pool.find(b"b0") is not None


def test_a_name_belongs_to_one_page() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    assert pool.name(first, block("a", 0))
    assert not pool.name(second, block("a", 0))
    assert pool.find(b"a0") == first
    pool.release([first, second])
    assert pool.available == 2
    pool.check_integrity()


def test_misuse_is_an_error() -> None:
    pool = BlockPool(2)
    (page,) = pool.allocate(1)
    pool.name(page, block("a", 0))
    with pytest.raises(ValueError, match="named already"):
        pool.name(page, block("b", 0))
    pool.release([page])
    with pytest.raises(ValueError, match="more often than held"):
        pool.release([page])
    with pytest.raises(ValueError, match="free"):
        pool.acquire([1 - page])


def test_what_came_and_went_between_two_looks_is_not_told() -> None:
    pool = BlockPool(1)
    cached_chain(pool, "a", 1)
    assert pool.take_changes() == ((b"a0",), ())
    cached_chain(pool, "b", 1)
    cached_chain(pool, "c", 1)
    assert pool.take_changes() == ((b"c0",), (b"a0",))
    cached_chain(pool, "d", 1)
    cached_chain(pool, "c", 1)
    assert pool.take_changes() == ((), ())


def test_blocks_come_parents_first() -> None:
    pool = BlockPool(6)
    cached_chain(pool, "a", 3)
    cached_chain(pool, "b", 3)
    depths = [block.depth for block in pool.blocks()]
    assert depths == sorted(depths)
    assert len(depths) == 6


@settings(deadline=None)
@given(st.data())
def test_whatever_is_done_the_books_agree(data: st.DataObject) -> None:
    pool = BlockPool(8)
    held: list[list[int]] = []
    on_device: set[bytes] = set()
    serial = 0
    for _ in range(data.draw(st.integers(1, 60))):
        what = data.draw(st.sampled_from(["allocate", "release", "name", "acquire", "transfer"]))
        if what == "allocate" and pool.available:
            held.append(pool.allocate(data.draw(st.integers(1, pool.available))))
        elif what == "release" and held:
            pool.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
        elif what == "name" and held:
            serial += 1
            page = data.draw(st.sampled_from(data.draw(st.sampled_from(held))))
            named = {p for b in pool.blocks() if (p := pool.find(b.name)) is not None}
            if page not in named:
                pool.name(page, Block(str(data.draw(st.integers(0, serial))).encode(), b"", serial % 4))
        elif what in ("acquire", "transfer") and (blocks := pool.blocks()):
            page = pool.find(data.draw(st.sampled_from(blocks)).name)
            assert page is not None
            pool.acquire([page])
            if what == "acquire":
                held.append([page])
            else:
                pool.release([page], used=False)
        pool.check_integrity()
        stored, removed = pool.take_changes()
        on_device = (on_device | set(stored)) - set(removed)
        assert on_device == {block.name for block in pool.blocks()}
        pages = {page for group in held for page in group}
        assert pool.available == pool.size - len(pages)
    for group in held:
        pool.release(group)
    assert pool.available == pool.size
