"""What an index offers to the tier below, and in which order; what it evicts once that tier has it."""

from services.kvstore.extents import UNIT
from services.kvstore.holder import Holder
from services.kvstore.index import Index
from services.protocol.kv import Entry, Key

A, B, C, D, E = b"A", b"B", b"C", b"D", b"E"


class Tier:
    def __init__(self, units: int) -> None:
        self.index = Index(units * UNIT, half_life=100.0)
        self.holder = Holder("one", "model")

    def put(self, key: Key, parent: Key = b"", now: float = 0.0, chance: float = 1.0) -> bool:
        entry = Entry(key=key, length=UNIT, cost=1.0, parent=parent, chance=chance)
        (extents,), _ = self.index.reserve(self.holder, [entry], now)
        self.index.commit(self.holder, [key], now)
        return extents is not None

    def coldest(self, units: int = 99) -> list[Key]:
        return [stored.key for stored in self.index.coldest(units * UNIT)]

    def dearest(self) -> list[Key]:
        return [stored.key for stored in self.index.dearest()]

    def mark(self, *keys: Key, saved: bool = True) -> None:
        for key in keys:
            stored = self.index.find(key)
            assert stored is not None
            self.index.mark(stored, saved=saved)

    @property
    def hits(self) -> list[Key]:
        keys = (A, B, C, D, E)
        return [key for key, state in zip(keys, self.index.lookup(keys), strict=True) if state == "hit"]


def test_the_coldest_first_each_behind_what_lies_before_it() -> None:
    tier = Tier(8)
    tier.put(A, now=5)
    tier.put(B, A, now=1)
    tier.put(C, A, now=3)
    tier.put(D, now=2)
    tier.put(E, now=0, chance=1.0)
    assert tier.coldest() == [E, A, B, D, C]
    assert tier.coldest() == [], "until they are used again"
    tier.put(D, now=9)
    lease, _ = tier.index.lease(tier.holder, [E], 9)
    tier.index.release(tier.holder, lease)
    assert tier.coldest() == [E]


def test_a_few_at_a_time_and_at_least_one() -> None:
    tier = Tier(8)
    for now, (key, parent) in enumerate([(A, b""), (B, A), (C, B), (D, b"")]):
        tier.put(key, parent, now)
    first = tier.coldest(2)
    assert first == [A, B]
    tier.mark(*first)
    assert tier.coldest(0) == [C]
    tier.mark(C)
    assert tier.coldest(0) == [D]


def test_the_dearest_first_each_behind_what_lies_before_it() -> None:
    tier = Tier(8)
    tier.put(A, now=0)
    tier.put(B, A, now=5)
    tier.put(C, now=3)
    tier.put(D, A, now=4, chance=1 / 64)
    tier.put(E, now=9)
    tier.mark(E)
    assert tier.dearest() == [A, B, C, D]


def test_what_is_reserved_is_not_offered() -> None:
    tier = Tier(8)
    tier.index.reserve(tier.holder, [Entry(key=A, length=UNIT, cost=1.0)], 0)
    assert (tier.coldest(), tier.dearest(), tier.index.unsaved_bytes) == ([], [], 0)
    tier.index.commit(tier.holder, [A], 0)
    assert (tier.coldest(), tier.index.unsaved_bytes) == ([A], UNIT)


def test_unsaved_bytes_follow_what_is_kept() -> None:
    tier = Tier(8)
    for key in (A, B, C):
        tier.put(key)
    tier.mark(A)
    tier.mark(A)
    assert tier.index.unsaved_bytes == 2 * UNIT
    tier.index.drop(tier.holder, [A, B])
    assert tier.index.unsaved_bytes == UNIT
    tier.mark(C)
    tier.mark(C, saved=False)
    assert tier.index.unsaved_bytes == UNIT
    assert tier.coldest() == [C]


def test_a_context_larger_than_the_arena_is_evicted_from_its_beginning_once_it_is_saved() -> None:
    tier = Tier(3)
    for now, (key, parent) in enumerate([(A, b""), (B, A), (C, B)]):
        tier.put(key, parent, now)
    assert not tier.put(D, C, now=3), "C goes on in it, and what lies before C may not go before C"
    tier.mark(A)
    assert not tier.put(D, C, now=3), "B, which goes on from A, is not saved"
    tier.mark(B)
    assert tier.put(D, C, now=3)
    assert tier.hits == [B, C, D]


def test_a_parent_may_go_once_its_last_child_that_is_not_saved_has_gone() -> None:
    tier = Tier(3)
    tier.put(A, now=0)
    tier.put(B, A, now=1)
    tier.put(C, A, now=9)
    tier.mark(A, C)
    tier.index.drop(tier.holder, [B])
    tier.put(D, now=10)
    tier.put(E, now=11)
    assert tier.hits == [C, D, E]


def test_what_is_saved_goes_before_what_is_not_and_for_less() -> None:
    tier = Tier(2)
    tier.put(A, now=9)
    tier.put(B, now=8)
    tier.mark(A)
    tier.index.reserve(tier.holder, [Entry(key=C, length=UNIT, cost=0.1)], 10)
    tier.index.commit(tier.holder, [C], 10)
    assert tier.hits == [B, C], "which is worth less than either, but A can be had again for microseconds"
    tier.mark(C)
    tier.mark(C, saved=False)
    assert not tier.put(D, now=10, chance=1 / 64), "now it would cost as much as before"


def test_one_call_may_take_a_parent_and_its_child() -> None:
    tier = Tier(3)
    tier.put(A, now=0)
    tier.put(B, A, now=1)
    tier.put(C, B, now=2)
    tier.mark(A, B, C)
    (extents,), full = tier.index.reserve(tier.holder, [Entry(key=D, length=3 * UNIT, cost=9.0)], 3)
    assert extents is not None
    assert full == 0
    assert tier.hits == []
    assert tier.index.counts().evictions == 3
