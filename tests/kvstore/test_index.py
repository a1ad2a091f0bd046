"""The index's rules, one by one; tests/kvstore/test_index_model.py holds it against a model."""

import pytest

from services.kvstore.entries import BadEntry
from services.kvstore.extents import UNIT
from services.kvstore.holder import Holder
from services.kvstore.index import Index
from services.protocol.kv import Entry, Extent

HALF_LIFE = 100.0
A, B, C, D, E = b"A", b"B", b"C", b"D", b"E"


def entry(key: bytes, parent: bytes = b"", cost: float = 1.0, units: int = 1) -> Entry:
    return Entry(key=key, length=units * UNIT, cost=cost, parent=parent)


class Store:
    """An index of few units, its clock, and one holder that most calls come from."""

    def __init__(self, units: int) -> None:
        self.index = Index(units * UNIT, half_life=HALF_LIFE, grace=2.0)
        self.holder = Holder("one", "model")
        self.now = 0.0

    def put(self, *entries: Entry, now: float | None = None) -> None:
        self.now = self.now if now is None else now
        _, full = self.index.reserve(self.holder, entries, self.now)
        assert full == 0
        assert self.index.commit(self.holder, [e.key for e in entries], self.now) == len(entries)

    def reserve(self, *entries: Entry) -> tuple[list[bool], int]:
        """Which entries got extents, and how many found no room."""
        extents, full = self.index.reserve(self.holder, entries, self.now)
        return [given is not None for given in extents], full

    def lease(self, *keys: bytes) -> int:
        lease, _ = self.index.lease(self.holder, keys, self.now)
        return lease

    @property
    def hits(self) -> set[bytes]:
        keys = (A, B, C, D, E)
        return {key for key, state in zip(keys, self.index.lookup(keys), strict=True) if state == "hit"}


def test_two_phases_and_a_lease() -> None:
    store = Store(4)
    (extents,), full = store.index.reserve(store.holder, [entry(A, units=2)], 0)
    assert (extents, full) == ((Extent(0, 2 * UNIT),), 0)
    assert store.index.lookup([A, B]) == ("pending", "miss")
    assert store.index.lease(store.holder, [A], 0) == (0, ())
    assert store.index.commit(store.holder, [A, B], 0) == 1
    assert store.index.lookup([A]) == ("hit",)
    lease, leased = store.index.lease(store.holder, [A, B], 0)
    assert lease > 0
    assert leased == (extents,)
    counts = store.index.counts()
    assert (counts.objects, counts.reserved, counts.leased, counts.used_bytes) == (1, 0, 1, 2 * UNIT)
    assert (counts.hits, counts.misses) == (1, 2)
    assert store.index.release(store.holder, lease) == 1
    assert store.index.release(store.holder, lease) == 0
    assert store.index.counts().leased == 0


def test_only_the_longest_prefix_is_leased() -> None:
    store = Store(8)
    store.put(entry(A), entry(B), entry(D))
    _, extents = store.index.lease(store.holder, [A, B, C, D], 0)
    assert len(extents) == 2


def test_a_second_writer_gets_nothing_and_a_second_put_does_no_harm() -> None:
    store, other = Store(4), Holder("two", "model")
    assert store.reserve(entry(A), entry(A)) == ([True, False], 0)
    assert store.index.reserve(other, [entry(A)], 0) == ((None,), 0)
    assert store.index.commit(other, [A], 0) == 0
    assert store.index.lookup([A]) == ("pending",)
    assert store.index.commit(store.holder, [A], 0) == 1
    assert store.reserve(entry(A)) == ([False], 0)
    assert store.hits == {A}


def test_the_least_recently_used_of_equals_goes_first() -> None:
    store = Store(3)
    for now, key in enumerate((A, B, C)):
        store.put(entry(key), now=now)
    store.now = 5
    store.index.release(store.holder, store.lease(A))
    store.put(entry(D), now=6)
    assert store.hits == {A, C, D}
    store.put(entry(E), now=7)
    assert store.hits == {A, D, E}
    assert store.index.counts().evictions == 2


def test_dear_objects_outlast_cheap_ones_until_they_have_aged() -> None:
    store = Store(2)
    store.put(entry(A, cost=8.0), now=0)  # worth as much as an ordinary one used 3 half-lives later
    store.put(entry(B), now=1)
    store.put(entry(C), now=2)
    assert store.hits == {A, C}
    store.put(entry(D), now=3 * HALF_LIFE + 3)
    store.put(entry(E), now=3 * HALF_LIFE + 4)
    assert store.hits == {D, E}


def test_small_objects_are_worth_more_than_large_ones_of_equal_cost() -> None:
    store = Store(4)
    store.put(entry(A, units=3), now=1)
    store.put(entry(B), now=0)
    store.put(entry(C), now=2)
    assert store.hits == {B, C}


def test_a_new_object_evicts_nothing_worth_more_and_wins_with_time() -> None:
    store = Store(2)
    store.put(entry(A, cost=4.0), entry(B, cost=4.0), now=0)
    store.now = 1
    assert store.reserve(entry(C)) == ([False], 1)
    assert store.hits == {A, B}
    store.put(entry(C), now=2 * HALF_LIFE + 1)
    assert len(store.hits) == 2
    assert C in store.hits


def test_nothing_is_evicted_for_an_object_that_finds_no_room_all_the_same() -> None:
    store = Store(3)
    store.put(entry(A), entry(B), now=0)
    store.put(entry(C, cost=64.0), now=0)
    store.now = 1
    assert store.reserve(entry(D, units=3, cost=3.0)) == ([False], 1)
    assert store.hits == {A, B, C}
    assert store.index.counts().evictions == 0
    store.put(entry(E, units=2, cost=3.0), now=2)
    assert store.hits == {C, E}


def test_an_object_larger_than_the_arena_is_refused() -> None:
    store = Store(2)
    store.put(entry(A), now=0)
    store.now = 1
    assert store.reserve(entry(B, units=3, cost=1000.0)) == ([False], 1)
    assert store.hits == {A}


def test_a_parent_outlives_its_children() -> None:
    store = Store(3)
    store.put(entry(A), entry(B, parent=A), now=0)
    store.put(entry(C), now=1)
    store.put(entry(D), now=2)
    assert store.hits == {A, C, D}
    store.put(entry(E), now=3)
    assert store.hits == {C, D, E}


def test_a_chain_is_evicted_from_its_end_in_one_call() -> None:
    store = Store(4)
    store.put(entry(A), entry(B, parent=A), entry(C, parent=B), now=0)
    store.put(entry(D, units=3, cost=3.0), now=1)
    assert store.hits == {A, D}


def test_a_reserved_child_protects_its_parent_too() -> None:
    store = Store(2)
    store.put(entry(A), now=0)
    store.now = 1
    assert store.reserve(entry(B, parent=A)) == ([True], 0)
    store.now = 2
    assert store.reserve(entry(C)) == ([False], 1)
    assert store.hits == {A}


def test_a_new_child_never_evicts_its_own_parent() -> None:
    store = Store(2)
    store.put(entry(A), now=0)
    store.put(entry(B), now=1)
    store.put(entry(C, parent=A), now=2)
    assert store.hits == {A, C}


def test_a_parent_may_come_after_its_child() -> None:
    store = Store(3)
    store.put(entry(B, parent=A), now=0)
    store.put(entry(A), now=1)
    store.put(entry(C), now=2)
    store.put(entry(D), now=3)
    assert store.hits == {A, C, D}


def test_entries_behind_a_refused_parent_are_refused() -> None:
    store = Store(2)
    store.put(entry(E, cost=1000.0), now=0)
    assert store.reserve(entry(A, units=2), entry(B, parent=A), entry(C, parent=B), entry(D)) == (
        [False, False, False, True],
        3,
    )


def test_entries_of_one_call_do_not_evict_each_other() -> None:
    store = Store(2)
    assert store.reserve(entry(A), entry(B), entry(C, cost=1000.0)) == ([True, True, False], 1)


def test_reserving_what_is_there_counts_as_a_use() -> None:
    store = Store(2)
    store.put(entry(A), now=0)
    store.put(entry(B), now=1)
    store.now = 2
    assert store.reserve(entry(A)) == ([False], 0)
    store.put(entry(C), now=3)
    assert store.hits == {A, C}


def test_lookup_does_not_count_as_a_use() -> None:
    store = Store(2)
    store.put(entry(A), now=0)
    store.put(entry(B), now=1)
    assert store.hits == {A, B}
    store.put(entry(C), now=3)
    assert store.hits == {B, C}


def test_leased_objects_stay_until_every_lease_is_over() -> None:
    store = Store(1)
    store.put(entry(A), now=0)
    first, second = store.lease(A), store.lease(A)
    store.now = 1000
    assert store.reserve(entry(B)) == ([False], 1)
    store.index.release(store.holder, first)
    assert store.reserve(entry(B)) == ([False], 1)
    store.index.release(store.holder, second)
    assert store.reserve(entry(B)) == ([True], 0)


def test_a_lease_is_released_by_its_holder_only() -> None:
    store, other = Store(1), Holder("two", "model")
    store.put(entry(A))
    lease = store.lease(A)
    assert store.index.release(other, lease) == 0
    assert store.index.counts().leased == 1


def test_dropping_a_leased_object_forgets_its_key_and_keeps_its_bytes() -> None:
    store = Store(2)
    store.put(entry(A))
    lease = store.lease(A)
    assert store.index.drop(store.holder, [A, B]) == 1
    assert store.index.lookup([A]) == ("miss",)
    assert store.index.counts().used_bytes == UNIT
    store.put(entry(A), now=1)  # anew, elsewhere
    store.index.release(store.holder, lease)
    assert store.hits == {A}
    assert store.index.counts().used_bytes == UNIT


def test_drop_gives_up_own_reservations_and_leaves_those_of_others() -> None:
    store, other = Store(2), Holder("two", "model")
    store.reserve(entry(A))
    store.index.reserve(other, [entry(B)], 0)
    assert store.index.drop(store.holder, [A, B]) == 1
    assert store.index.lookup([A, B]) == ("miss", "pending")
    assert store.index.commit(store.holder, [A], 0) == 0
    assert store.index.counts().used_bytes == UNIT


def test_drop_without_keys_forgets_the_fingerprint() -> None:
    store, other = Store(4), Holder("two", "other model")
    store.put(entry(A), entry(B, parent=A))
    store.index.reserve(other, [entry(C)], 0)
    store.index.commit(other, [C], 0)
    assert store.index.drop(store.holder, []) == 2
    assert store.hits == {C}


def test_the_end_of_a_connection_frees_keys_at_once_and_bytes_after_the_grace() -> None:
    store, gone = Store(2), Holder("gone", "model")
    index = store.index
    index.reserve(gone, [entry(A), entry(B)], 0)
    index.commit(gone, [A], 0)
    index.lease(gone, [A], 0)
    index.end(gone, 10)
    assert index.lookup([A, B]) == ("hit", "miss")
    assert index.counts().reserved == 0
    store.now = 11.9
    assert store.reserve(entry(B)) == ([False], 1), "a copy to the bytes may still be under way"
    store.now = 12
    assert store.reserve(entry(B), entry(C)) == ([True, True], 0)
    counts = index.counts()
    assert (counts.leased, counts.reserved, counts.evictions) == (0, 2, 1)


def test_settle_ends_what_is_due_and_no_more() -> None:
    store = Store(4)
    for number in range(2):
        holder = Holder(str(number), "model")
        store.index.reserve(holder, [entry(A, units=2)], 0)
        store.index.end(holder, now=number)
    store.index.settle(2.5)
    assert store.index.counts().used_bytes == 2 * UNIT
    store.index.settle(3)
    assert store.index.counts().used_bytes == 0


@pytest.mark.parametrize(
    "bad",
    [
        Entry(key=b"", length=1, cost=1),
        Entry(key=b"k" * 257, length=1, cost=1),
        Entry(key=b"k", length=1, cost=1, parent=b"p" * 257),
        Entry(key=b"k", length=1, cost=1, parent=b"k"),
        Entry(key=b"k", length=0, cost=1),
        Entry(key=b"k", length=-4096, cost=1),
        Entry(key=b"k", length=1, cost=float("nan")),
        Entry(key=b"k", length=1, cost=float("inf")),
        Entry(key=b"k", length=1, cost=-1.0),
    ],
)
def test_bad_entries_are_refused_and_change_nothing(bad: Entry) -> None:
    store = Store(4)
    with pytest.raises(BadEntry):
        store.reserve(entry(A), bad)
    counts = store.index.counts()
    assert (counts.used_bytes, counts.reserved) == (0, 0)
