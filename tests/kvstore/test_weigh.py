"""What a Weigh reaches, and what it leaves alone."""

import pytest

from services.kvstore.entries import BadEntry, check_chance
from services.kvstore.extents import UNIT
from services.kvstore.holder import Holder
from services.kvstore.index import Index
from services.protocol.kv import Entry, Key, state_key

TREE = {b"a": b"", b"b": b"a", b"c": b"b", b"d": b"c"}


class Tree:
    """An index with all these objects in it, each behind its parent."""

    def __init__(self, parents: dict[Key, Key]) -> None:
        self.index = Index(64 * UNIT, half_life=100.0)
        self.holder = Holder("one", "model")
        for key, parent in parents.items():
            self.put(key, parent)

    def put(self, key: Key, parent: Key, chance: float = 1.0) -> None:
        self.index.reserve(self.holder, [Entry(key=key, length=UNIT, cost=1.0, parent=parent, chance=chance)], 0)
        self.index.commit(self.holder, [key], 0)

    def score(self, key: Key) -> float:
        stored = self.index.find(key)
        assert stored is not None
        return stored.score


def test_a_context_is_weighed_up_to_its_beginning() -> None:
    tree = Tree(TREE)
    assert tree.index.weigh([b"d"], 0.25) == set(TREE)
    assert tree.score(b"a") == tree.score(b"d") == tree.score(b"b")
    assert tree.index.weigh([b"b", b"nowhere"], 0.5) == set(), "c goes on from b, and is another context's end"
    assert tree.index.weigh([], 0.5) == set()


def test_up_to_where_another_context_parts() -> None:
    tree = Tree(TREE | {b"x": b"b", b"y": b"x"})
    shared, alone = tree.score(b"b"), tree.score(b"y")
    assert tree.index.weigh([b"d"], 0.25) == {b"c", b"d"}
    assert (tree.score(b"b"), tree.score(b"y")) == (shared, alone)
    assert tree.score(b"d") == alone - 2
    assert tree.index.weigh([b"d", b"y"], 0.5) == {b"c", b"d", b"x", b"y"}


def test_what_was_shared_once_stays_so() -> None:
    tree = Tree(TREE)
    tree.index.weigh([b"d"], 0.25)
    before = tree.score(b"b")
    tree.put(b"x", b"b")
    assert tree.score(b"b") == before + 2, "several contexts need it now"
    tree.index.drop(tree.holder, [b"x"])
    assert tree.index.weigh([b"d"], 0.125) == {b"c", b"d"}
    tree.put(b"b", b"a", chance=0.25)
    assert tree.score(b"b") == before + 2


def test_a_parent_that_comes_between_two_contexts_is_shared() -> None:
    tree = Tree({b"c": b"b", b"x": b"b", b"b": b"a", b"a": b""})
    assert tree.index.weigh([b"c"], 0.25) == {b"c"}


def test_checkpoints_belong_to_the_context_of_their_block() -> None:
    early, late, end = state_key(b"b", 128), state_key(b"c", 192), state_key(b"tail", 250)
    tree = Tree(TREE | {early: b"b", late: b"c", end: b"d"})
    everything = {*TREE, early, late, end}
    assert tree.index.weigh([b"d"], 0.25) == everything
    assert tree.index.weigh([end], 0.25) == everything
    assert tree.index.weigh([end, b"d", late], 0.5) == everything
    assert tree.score(early) == tree.score(b"a") == tree.score(end)
    assert tree.index.weigh([early], 0.125) == {early}, "c goes on from where it lies"


def test_a_gap_ends_the_walk() -> None:
    tree = Tree(TREE)
    tree.index.drop(tree.holder, [b"b"])
    assert tree.index.weigh([b"d"], 0.25) == {b"c", b"d"}


def test_what_is_weighed_down_goes_first_and_what_is_weighed_up_last() -> None:
    index, holder = Index(3 * UNIT, half_life=100.0), Holder("one", "model")

    def put(key: Key, now: float) -> bool:
        extents, _ = index.reserve(holder, [Entry(key=key, length=UNIT, cost=1.0)], now)
        index.commit(holder, [key], now)
        return extents[0] is not None

    for now, key in enumerate((b"a", b"b", b"c")):
        put(key, now)
    index.weigh([b"b"], 0.25)
    assert put(b"d", 3)
    assert index.lookup([b"a", b"b", b"c", b"d"]) == ("hit", "miss", "hit", "hit")
    index.weigh([b"a", b"c", b"d"], 0.25)
    index.weigh([b"a"], 1.0)
    assert put(b"e", 4)
    assert put(b"f", 5)
    assert index.lookup([b"a", b"c", b"d"]) == ("hit", "miss", "miss")


def test_the_chance_of_an_entry_counts_and_a_lease_keeps_it() -> None:
    tree = Tree({})
    tree.put(b"a", b"", chance=0.25)
    tree.put(b"b", b"", chance=1.0)
    assert tree.score(b"a") == tree.score(b"b") - 2
    lease, _ = tree.index.lease(tree.holder, [b"a"], 100.0)
    tree.index.release(tree.holder, lease)
    assert tree.score(b"a") == tree.score(b"b") - 1, "used a half-life later"
    tree.put(b"a", b"", chance=0.5)
    assert tree.score(b"a") == tree.score(b"b") - 1, "used at 0, at half the chance"


@pytest.mark.parametrize("chance", [0.0, -1.0, 1.5, float("nan"), float("inf")])
def test_a_chance_that_is_none_is_refused(chance: float) -> None:
    with pytest.raises(BadEntry):
        check_chance(chance)
    with pytest.raises(BadEntry):
        Tree({}).index.reserve(Holder("one", "m"), [Entry(key=b"k", length=1, cost=1, chance=chance)], 0)
