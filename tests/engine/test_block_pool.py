from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.cache.block_pool import BlockPool
from services.engine.cache.content import Block
from services.engine.cache.owners import Owner
from services.protocol import worth
from services.protocol.generate import Standing


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
    pool.release([old])
    pool.allocate(1)
    assert pool.find(b"a0") is None
    assert pool.find(b"b0") is not None


class Pressed:
    """A pool by a clock of the test's own, and sessions that leave chains in it."""

    def __init__(self, pages: int, recurrent: bool = False) -> None:
        self.now = 1000.0
        self.pool = BlockPool(pages, recurrent, clock=lambda: self.now)

    def leaves(self, session: str, chain: str, length: int, standing: Standing = "idle") -> Owner:
        owner = Owner(session, standing)
        self.again(owner, chain, length)
        return owner

    def again(self, owner: Owner, chain: str, length: int) -> None:
        pages = []
        for depth in range(length):
            page = self.pool.find(block(chain, depth).name)
            if page is None:
                (page,) = self.pool.allocate(1)
                self.pool.name(page, block(chain, depth), owner)
            else:
                self.pool.acquire([page])
            pages.append(page)
        self.pool.release(pages, owner)
        self.now += 60

    def takes(self, count: int, taker: str = "taker") -> list[str]:
        """What goes when so many pages are taken; the pages come back free."""
        self.pool.take_changes()
        pages = self.pool.allocate(count, taker)
        self.pool.check_integrity()
        self.pool.release(pages)
        return [name.decode() for name in self.pool.take_changes()[1]]


def test_who_is_waited_for_stays_before_who_hardly_comes_back() -> None:
    """Used in this order: an agent that waits for its tool, an idle chat, a sub-agent that is done, a title."""
    pressed = Pressed(8)
    pressed.leaves("agent", "a", 2, "waiting")
    pressed.leaves("chat", "c", 2, "idle")
    pressed.leaves("sub", "s", 2, "finished")
    pressed.leaves("title", "t", 2, "one_off")
    assert pressed.takes(8) == ["s1", "s0", "t1", "t0", "c1", "c0", "a1", "a0"]


def test_time_wears_off_what_a_standing_gives() -> None:
    pressed = Pressed(2)
    pressed.leaves("chat", "c", 1, "idle")
    pressed.now += 4 * worth.HALF_LIFE + 10  # a side request's prompt is worth 1/16 of an idle chat's
    pressed.leaves("title", "t", 1, "one_off")
    assert pressed.takes(1) == ["c0"]


@pytest.mark.parametrize(("standing", "first"), [("waiting", "b0"), ("finished", "a0")])
def test_a_standing_that_changes_changes_what_its_session_left(standing: Standing, first: str) -> None:
    pressed = Pressed(3)
    owner = pressed.leaves("agent", "a", 2, "idle")
    pressed.leaves("other", "b", 1, "idle")
    assert pressed.takes(1) == ["a1"], "the order is made, and its end is another"
    owner.standing = standing
    pressed.pool.weigh(owner)
    pressed.pool.allocate(1)
    pressed.pool.take_changes()
    assert pressed.takes(1) == [first]


def test_what_several_sessions_use_is_worth_most() -> None:
    pressed = Pressed(2)
    pressed.leaves("sub", "a", 1, "finished")
    pressed.leaves("other sub", "a", 1, "finished")
    pressed.leaves("chat", "b", 1, "idle")
    assert pressed.pool.shared(b"a0")
    assert pressed.takes(1) == ["b0"]


def test_what_the_kvstore_has_goes_before_what_is_nowhere_else() -> None:
    pressed = Pressed(3)
    for chain in "abc":
        pressed.leaves(chain, chain, 1)
    pressed.pool.kept_elsewhere(b"c0")
    pressed.pool.kept_elsewhere(b"b0", refused=True)
    assert pressed.takes(1) == ["c0"]
    pressed.leaves("d", "d", 1)
    pressed.pool.kept_elsewhere(b"d0")
    pressed.pool.kept_here_only()
    assert pressed.takes(2) == ["a0", "b0"]
    departures = {name: pressed.pool.gone.find(name) for name in (b"a0", b"b0", b"c0")}
    assert {name: (d.stored, d.refused, d.taker) for name, d in departures.items() if d is not None} == {
        b"a0": (False, False, "taker"),
        b"b0": (False, False, "taker"),  # the store that refused it is another one's past
        b"c0": (True, False, "taker"),
    }
    assert list(pressed.pool.gone.in_store()) == []


def test_what_a_recurrent_model_cannot_go_on_from_goes_first() -> None:
    pressed = Pressed(5, recurrent=True)
    pressed.leaves("a", "a", 3, "waiting")
    pressed.leaves("b", "b", 2, "one_off")
    pressed.pool.resumable(b"a0", True)
    pressed.pool.resumable(b"b1", True)
    assert pressed.takes(2) == ["a2", "a1"]
    pressed.pool.resumable(b"a0", False)
    assert pressed.takes(4) == ["a0", "b1"], "and three were free"


def test_a_parent_whose_child_is_held_goes_only_in_need() -> None:
    pressed = Pressed(3)
    pressed.leaves("a", "a", 2, "one_off")
    pressed.leaves("b", "b", 1, "waiting")
    child = pressed.pool.find(b"a1")
    assert child is not None
    pressed.pool.acquire([child])
    assert pressed.takes(1) == ["b0"]
    pressed.pool.allocate(1)
    pressed.pool.take_changes()
    assert pressed.takes(1) == ["a0"]
    pressed.pool.release([child])
    pressed.pool.check_integrity()


def test_the_order_does_not_grow_without_end() -> None:
    pressed = Pressed(4)
    owner = pressed.leaves("a", "a", 4)
    for _ in range(100):
        pressed.again(owner, "a", 4)
        pressed.pool.weigh(owner)
    assert len(pressed.pool._order) <= 4 * 4 + 1
    assert pressed.takes(4) == ["a3", "a2", "a1", "a0"]


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
    owners = [None, Owner("a"), Owner("b")]
    on_device: set[bytes] = set()
    serial = 0
    for _ in range(data.draw(st.integers(1, 60))):
        what = data.draw(st.sampled_from(["allocate", "release", "name", "acquire", "transfer", "weigh"]))
        if what == "allocate" and pool.available:
            held.append(pool.allocate(data.draw(st.integers(1, pool.available))))
        elif what == "release" and held:
            pool.release(held.pop(data.draw(st.integers(0, len(held) - 1))), data.draw(st.sampled_from(owners)))
        elif what == "name" and held:
            serial += 1
            page = data.draw(st.sampled_from(data.draw(st.sampled_from(held))))
            named = {p for b in pool.blocks() if (p := pool.find(b.name)) is not None}
            if page not in named:
                parent = str(data.draw(st.integers(0, serial))).encode() if data.draw(st.booleans()) else b""
                pool.name(page, Block(str(data.draw(st.integers(0, serial))).encode(), parent, serial % 4))
        elif what == "weigh":
            owner = data.draw(st.sampled_from([owner for owner in owners if owner is not None]))
            owner.standing = data.draw(st.sampled_from(get_args(Standing)))
            pool.weigh(owner)
        elif what in ("acquire", "transfer") and (blocks := pool.blocks()):
            page = pool.find(data.draw(st.sampled_from(blocks)).name)
            assert page is not None
            pool.acquire([page])
            if what == "acquire":
                held.append([page])
            else:
                pool.release([page])
        pool.check_integrity()
        stored, removed = pool.take_changes()
        on_device = (on_device | set(stored)) - set(removed)
        assert on_device == {block.name for block in pool.blocks()}
        pages = {page for group in held for page in group}
        assert pool.available == pool.size - len(pages)
    for group in held:
        pool.release(group)
    assert pool.available == pool.size
