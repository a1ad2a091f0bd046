"""The books of slots and checkpoints, without a scheduler."""

import pytest

from services.engine.cache.block_pool import BlockPool
from services.engine.cache.checkpoints import REMEMBERED, Checkpoint, Checkpoints, Mark
from services.engine.cache.content import Block
from services.engine.cache.owners import Owner
from services.engine.cache.prefix_cache import BlockChain, PrefixCache
from services.protocol.hashing import chain as names_of
from services.protocol.hashing import extend, root
from services.protocol.kv import state_key

ROOT = root("model")


class Books:
    """A pool of pages and slots, and what a request that computes `tokens` does with them."""

    def __init__(self, pages: int = 16, slots: int = 4) -> None:
        self.pool = BlockPool(pages)
        self.cache = PrefixCache(self.pool)
        self.checkpoints = Checkpoints(self.pool, slots)

    def compute(
        self,
        tokens: list[int],
        *,
        root: bool = False,
        before: Checkpoint | None = None,
        owner: Owner | None = None,
    ) -> Checkpoint | None:
        chain = BlockChain(ROOT, tokens)
        mark = Mark.of(chain, len(tokens))
        pages = self.pool.allocate(chain.full + bool(mark.tail))
        for depth in range(chain.full):
            pages[depth], _ = self.cache.insert(chain.block(depth), pages[depth])
        slot = self.checkpoints.take()
        assert slot is not None
        page = pages[-1] if mark.tail else -1
        checkpoint = self.checkpoints.publish(mark, slot, page, root=root, before=before, owner=owner)
        self.pool.release(pages)
        self.check()
        return checkpoint

    def find(self, tokens: list[int], above: int = 0) -> int | None:
        found = self.checkpoints.find(BlockChain(ROOT, tokens), above)
        return None if found is None else found.mark.position

    def flush_blocks(self) -> None:
        self.pool.release(self.pool.allocate(self.pool.available))

    def check(self) -> None:
        self.pool.check_integrity()
        self.checkpoints.check_integrity(idle=False)


def test_a_mark_is_the_protocols_key() -> None:
    tokens = list(range(200))
    mark = Mark.of(BlockChain(ROOT, tokens), 150)
    block = list(names_of(ROOT, tokens))[1]
    assert mark.key == state_key(extend(block, tokens[128:150]), 150)
    assert (mark.block, mark.tail, mark.full) == (block, tuple(tokens[128:150]), 2)
    at_border = Mark.of(BlockChain(ROOT, tokens), 128)
    assert (at_border.key, at_border.tail) == (state_key(block, 128), ())
    short = Mark.of(BlockChain(ROOT, tokens), 10)
    assert (short.block, short.full) == (ROOT, 0)


def test_the_deepest_exact_prefix_is_found() -> None:
    books = Books()
    tokens = list(range(200))
    for length in (10, 64, 150):
        books.compute(tokens[:length])
    assert books.find(tokens) == 150
    assert books.find(tokens[:150]) == 150
    assert books.find(tokens[:149]) == 64
    assert books.find([*tokens[:140], 7, 7, 7]) == 64
    assert books.find([*tokens[:12], 7]) == 10
    assert books.find([7, *tokens[1:]]) is None
    assert books.find(tokens, above=149) == 150
    assert books.find(tokens, above=150) is None


def test_one_block_may_have_many_tails() -> None:
    books = Books(slots=6)
    tokens = list(range(64))
    for tail in ([1], [1, 2], [1, 2, 3], [2]):
        books.compute(tokens + tail)
    assert books.find([*tokens, 1, 2, 9]) == 66
    assert books.find([*tokens, 2, 2, 9]) == 65


def test_the_same_prefix_twice_is_one_checkpoint() -> None:
    books = Books()
    assert books.compute(list(range(100))) is not None
    assert books.compute(list(range(100))) is None
    assert books.checkpoints.available == 4
    assert len(books.checkpoints.all()) == 1


def test_without_its_blocks_or_its_tail_it_is_not_found() -> None:
    books = Books(pages=4)
    books.compute(list(range(100)))
    books.pool.release(books.pool.allocate(3))  # takes the tail, which goes first
    assert books.find(list(range(100))) is None
    assert books.compute(list(range(100))) is not None, "what is useless is replaced"
    assert books.find(list(range(100))) == 100
    books.compute(list(range(128)))
    books.flush_blocks()
    assert books.find(list(range(128))) is None


def test_a_parent_block_alone_missing_is_noticed() -> None:
    books = Books(pages=4)
    tokens = list(range(192))
    books.compute(tokens)
    held = [books.pool.find(BlockChain(ROOT, tokens).block(depth).name) for depth in (1, 2)]
    pages = [page for page in held if page is not None]
    books.pool.acquire(pages)  # as a write-through does
    books.flush_blocks()
    books.pool.release(pages)
    assert books.find(tokens) is None


def test_slots_go_from_the_useless_then_the_superseded_then_the_longest_unused() -> None:
    books = Books(pages=64, slots=4)
    chains = [[family] * 128 for family in range(4)]
    for tokens in chains:
        books.compute(tokens)
    chain = BlockChain(ROOT, [*chains[2], 5, 5])
    books.checkpoints.supersede(chain, 130, set())
    order = []
    for extra in range(4):
        there = {checkpoint.mark.key for checkpoint in books.checkpoints.all()}
        books.compute([50 + extra] * 256, root=True)
        gone = there - {checkpoint.mark.key for checkpoint in books.checkpoints.all()}
        order += [tokens[0] for tokens in chains if Mark.of(BlockChain(ROOT, tokens), 128).key in gone]
    assert order == [2, 0, 1, 3]


def test_slots_go_from_who_hardly_comes_back_and_from_what_saves_little() -> None:
    books = Books(pages=64, slots=4)
    waiting, done = Owner("agent", "waiting"), Owner("sub", "finished")
    kept = books.compute([1] * 128, owner=waiting)
    books.compute([2] * 1024, owner=done)
    first = books.compute([3] * 512, owner=waiting)
    assert first is not None
    books.compute([3] * 520, before=first, owner=waiting)
    order = []
    for extra in range(3):
        there = {checkpoint.mark.key: checkpoint.mark for checkpoint in books.checkpoints.all()}
        books.compute([50 + extra] * 1024, root=True)
        order += [there[key] for key in there.keys() - {there.mark.key for there in books.checkpoints.all()}]
    assert [(mark.tail[:1], mark.position) for mark in order[:1]] == [((3,), 520)], "it saves 8 tokens"
    assert [mark.position for mark in order[1:]] == [1024, 128], "a sub-agent's, then the shorter one"
    assert kept is not None
    assert not kept.kept


def test_what_a_checkpoint_saves_grows_when_those_before_it_go() -> None:
    books = Books(pages=64, slots=3)
    first = books.compute([1] * 64)
    second = books.compute([1] * 128, before=first)
    third = books.compute([1] * 192, before=second)
    assert first is not None and second is not None and third is not None  # noqa: PT018
    assert [each.base for each in (first, second, third)] == [0, 64, 128]
    books.checkpoints.supersede(BlockChain(ROOT, [1] * 192), 192, {third.mark.key})
    assert [each.base for each in (first, second, third)] == [0, 0, 0], "superseded ones are as good as gone"
    first.superseded = False
    assert [each.base for each in (second, third)] == [64, 64]
    books.compute([2] * 192)
    assert not second.kept, "the superseded one was worth least"
    assert third.base == 64
    assert third.before is first, "what is gone is not kept alive by names"


def test_a_useless_one_goes_before_a_superseded_one() -> None:
    books = Books(pages=6, slots=2)
    books.compute([1] * 128)
    books.compute([2] * 128)
    books.checkpoints.supersede(BlockChain(ROOT, [1] * 130), 130, set())
    chain = BlockChain(ROOT, [1] * 128)
    pages = books.cache.match(chain)
    books.pool.acquire(pages)
    books.flush_blocks()
    books.pool.release(pages)
    assert books.checkpoints.take() is not None
    assert books.find([1] * 128) == 128


def test_branching_points_and_roots_are_not_superseded() -> None:
    books = Books()
    first = books.compute([1] * 64, root=True)
    second = books.compute([1] * 128)
    third = books.compute([1] * 192)
    assert first is not None and second is not None and third is not None  # noqa: PT018
    for _ in range(2):
        books.checkpoints.pin(second)
        books.checkpoints.unpin(second, Owner("s"))
    books.checkpoints.supersede(BlockChain(ROOT, [1] * 300), 300, set())
    assert [first.superseded, second.superseded, third.superseded] == [False, False, True]
    books.checkpoints.supersede(BlockChain(ROOT, [1] * 300), 300, {third.mark.key})
    books.checkpoints.pin(third)
    books.checkpoints.unpin(third, Owner("s"))
    assert not third.superseded, "it was of use after all"


def test_pinned_ones_keep_slot_and_tail() -> None:
    books = Books(pages=3, slots=1)
    checkpoint = books.compute(list(range(70)))
    assert checkpoint is not None
    books.checkpoints.pin(checkpoint)
    assert books.checkpoints.take() is None
    books.flush_blocks()
    assert books.checkpoints.tail(checkpoint) >= 0
    books.check()
    books.checkpoints.unpin(checkpoint)
    assert books.checkpoints.take() == checkpoint.slot or checkpoint.slot == -1
    assert books.pool.available == 3
    books.check()


def test_taken_over_it_is_no_checkpoint_any_more() -> None:
    books = Books(slots=1)
    checkpoint = books.compute(list(range(70)))
    assert checkpoint is not None
    slot, page = books.checkpoints.take_over(checkpoint)
    assert books.find(list(range(70))) is None
    assert books.pool.held(page)
    books.check()
    mark = Mark.of(BlockChain(ROOT, list(range(70))), 70)
    assert books.checkpoints.publish(mark, slot, page) is not None, "the page is nameless, so it may be named again"
    books.pool.release((page,))
    assert books.find(list(range(70))) == 70
    books.checkpoints.check_integrity(idle=True)


def test_what_the_store_has_is_remembered_until_it_is_lost() -> None:
    books = Books(slots=1)
    checkpoint = books.compute(list(range(100)))
    assert checkpoint is not None
    checkpoint.stored = True
    books.compute([9] * 100)
    chain = BlockChain(ROOT, list(range(150)))
    assert books.find(list(range(150))) is None
    assert [mark.position for mark in books.checkpoints.known(chain, 0)] == [100]
    assert books.checkpoints.known(BlockChain(ROOT, [9] * 100), 100) == []
    again = books.compute(list(range(100)))
    assert again is checkpoint
    assert not again.stored, "it was computed, so it was not found"
    again.stored = True
    books.compute([9] * 100)
    books.checkpoints.forget_store()
    assert books.checkpoints.known(chain, 0) == []
    books.check()


def test_what_is_remembered_is_bounded() -> None:
    books = Books(pages=4, slots=1)
    for index in range(REMEMBERED + 10):
        slot = books.checkpoints.take()
        assert slot is not None
        mark = Mark.of(BlockChain(ROOT, [index]), 1)
        checkpoint = books.checkpoints.publish(mark, slot, -1)
        assert checkpoint is not None
        checkpoint.stored = True
    assert books.checkpoints.known(BlockChain(ROOT, [5]), 0) == []
    assert len(books.checkpoints.known(BlockChain(ROOT, [REMEMBERED]), 0)) == 1
    books.check()


def test_the_books_notice_a_lost_slot() -> None:
    books = Books()
    slot = books.checkpoints.take()
    with pytest.raises(AssertionError, match="slots leaked"):
        books.checkpoints.check_integrity(idle=True)
    assert slot is not None
    books.checkpoints.give_back(slot)
    books.checkpoints.check_integrity(idle=True)


def test_a_tail_is_told_to_nobody() -> None:
    pool = BlockPool(2)
    (page,) = pool.allocate(1)
    assert pool.name(page, Block(b"tail", b"block", 1, tail=True))
    pool.release((page,))
    assert pool.blocks() == []
    assert pool.find(b"tail") == page
    pool.allocate(2)
    assert pool.find(b"tail") is None
    assert pool.take_changes() == ((), ())


@pytest.mark.parametrize("held", [True, False])
def test_a_forgotten_tail_is_a_free_page(held: bool) -> None:
    pool = BlockPool(2)
    (page,) = pool.allocate(1)
    pool.name(page, Block(b"tail", b"block", 1, tail=True))
    if not held:
        pool.release((page,))
    pool.forget_tail(b"tail")
    pool.forget_tail(b"unknown")
    assert pool.find(b"tail") is None
    if held:
        pool.release((page,))
    assert pool.available == 2
    pool.check_integrity()
