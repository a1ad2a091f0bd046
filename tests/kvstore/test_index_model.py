"""The index against a model that keeps plain lists and searches them."""

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.kvstore.extents import UNIT, rounded
from services.kvstore.holder import Holder
from services.kvstore.index import Index
from services.protocol.kv import Entry, Extent
from services.protocol.worth import density, score

ARENA_UNITS = 9
HALF_LIFE = 10.0
GRACE = 3.0
KEYS = [bytes([65 + n]) for n in range(10)]
# A forest. Costs differ for every key, so that no two scores are equal and the order of eviction is one.
PARENT = {key: KEYS[(n - 1) // 2] if n else b"" for n, key in enumerate(KEYS)}
UNITS = {key: 1 + n % 3 for n, key in enumerate(KEYS)}
COST = {key: 1.0 + 0.37 * n for n, key in enumerate(KEYS)}

keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6)
people = st.integers(0, 1)
chances = st.sampled_from([1.0, 0.5, 1 / 64])


def worth(key: bytes, chance: float, used: float) -> float:
    return score(density(COST[key], UNITS[key] * UNIT - 5), chance, used, HALF_LIFE)


@dataclass(eq=False)
class Item:
    key: bytes
    used: float
    chance: float
    writer: int | None
    pins: int = 0
    shared: bool = False

    @property
    def score(self) -> float:
        return worth(self.key, 1.0 if self.shared else self.chance, self.used)


@dataclass
class Model:
    items: dict[bytes, Item] = field(default_factory=dict)
    forgotten: list[Item] = field(default_factory=list)
    """Out of `items`, their bytes still pinned."""

    def free(self) -> int:
        pinned = [item for item in self.forgotten if item.pins]
        return ARENA_UNITS - sum(UNITS[item.key] for item in [*self.items.values(), *pinned])

    def make_room(self, key: bytes, chance: float, now: float) -> bool:
        """Evicts from `items`, or leaves it as it was."""
        items = dict(self.items)
        free = self.free()
        while free < UNITS[key]:
            parents = {PARENT[kept] for kept in items} | {PARENT[key]}
            victims = [
                item
                for item in items.values()
                if item.writer is None
                and not item.pins
                and item.key not in parents
                and item.score < worth(key, chance, now)
            ]
            if not victims:
                return False
            victim = min(victims, key=lambda item: item.score)
            free += UNITS[victim.key]
            del items[victim.key]
        self.items = items
        return True

    def children(self, key: bytes) -> list[Item]:
        return [item for item in self.items.values() if PARENT[item.key] == key]

    def share(self) -> None:
        for item in self.items.values():
            item.shared |= len(self.children(item.key)) > 1

    def weigh(self, key: bytes, chance: float) -> set[bytes]:
        weighed: set[bytes] = set()
        came = b""
        while key in self.items and not self.items[key].shared:
            if any(child.key != came for child in self.children(key)):
                break
            self.items[key].chance = chance
            weighed.add(key)
            came, key = key, PARENT[key]
        return weighed

    def forget(self, key: bytes) -> Item:
        item = self.items.pop(key)
        self.forgotten.append(item)
        return item


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.index = Index(ARENA_UNITS * UNIT, HALF_LIFE, GRACE)
        self.model = Model()
        self.holders = [Holder(str(n), "model") for n in range(2)]
        self.leases: list[dict[int, list[Item]]] = [{}, {}]
        self.ended: list[tuple[float, list[Item]]] = []
        self.extents: dict[int, tuple[Item, tuple[Extent, ...]]] = {}

    @rule(who=people, wanted=keys, wait=st.floats(0.01, 20), chance=chances)
    def reserve(self, who: int, wanted: list[bytes], wait: float, chance: float) -> None:
        self.now += wait
        self.settle()
        entries = [
            Entry(key=k, length=UNITS[k] * UNIT - 5, cost=COST[k], parent=PARENT[k], chance=chance) for k in wanted
        ]
        expected: list[bool] = []
        refused: set[bytes] = set()
        full = 0
        for key in wanted:
            if key in self.model.items:
                self.model.items[key].used = self.now
                self.model.items[key].chance = chance
                expected.append(False)
            elif PARENT[key] in refused or not self.model.make_room(key, chance, self.now):
                refused.add(key)
                full += 1
                expected.append(False)
            else:
                self.model.items[key] = Item(key, self.now, chance, who)
                self.model.share()
                expected.append(True)
        extents, got_full = self.index.reserve(self.holders[who], entries, self.now)
        assert [given is not None for given in extents] == expected
        assert got_full == full
        for key, given in zip(wanted, extents, strict=True):
            if given is not None:
                assert sum(extent.length for extent in given) == UNITS[key] * UNIT - 5
                item = self.model.items[key]
                self.extents[id(item)] = (item, given)

    @rule(who=people, wanted=keys, wait=st.floats(0.01, 5))
    def commit(self, who: int, wanted: list[bytes], wait: float) -> None:
        self.now += wait
        done = 0
        for key in wanted:
            item = self.model.items.get(key)
            if item is not None and item.writer == who:
                item.writer, item.used = None, self.now
                done += 1
        assert self.index.commit(self.holders[who], wanted, self.now) == done

    @rule(who=people, wanted=keys, wait=st.floats(0.01, 5))
    def lease(self, who: int, wanted: list[bytes], wait: float) -> None:
        self.now += wait
        hits: list[Item] = []
        for key in wanted:
            item = self.model.items.get(key)
            if item is None or item.writer is not None:
                break
            item.used = self.now
            item.pins += 1
            hits.append(item)
        lease, extents = self.index.lease(self.holders[who], wanted, self.now)
        assert extents == tuple(self.extents[id(item)][1] for item in hits)
        assert bool(lease) == bool(hits)
        if lease:
            assert lease not in self.leases[who]
            self.leases[who][lease] = hits

    @rule(who=people, wanted=keys, wait=st.floats(0.01, 20), chance=chances)
    def put(self, who: int, wanted: list[bytes], wait: float, chance: float) -> None:
        self.reserve(who, wanted, wait, chance)
        self.commit(who, wanted, 0.01)

    @rule(wanted=keys, chance=chances)
    def weigh(self, wanted: list[bytes], chance: float) -> None:
        expected = {weighed for key in wanted for weighed in self.model.weigh(key, chance)}
        assert self.index.weigh(wanted, chance) == expected

    @rule(who=people, key=st.sampled_from(KEYS), wait=st.floats(0.01, 5))
    def touch(self, who: int, key: bytes, wait: float) -> None:
        before = len(self.leases[who])
        self.lease(who, [key], wait)
        if len(self.leases[who]) > before:
            self.release(who, -1)

    @rule(who=people, choice=st.integers(0, 99))
    def release(self, who: int, choice: int) -> None:
        if not self.leases[who]:
            assert self.index.release(self.holders[who], 10**6) == 0
            return
        lease = list(self.leases[who])[choice % len(self.leases[who])]
        assert self.index.release(self.holders[1 - who], lease) == 0
        items = self.leases[who].pop(lease)
        for item in items:
            item.pins -= 1
        assert self.index.release(self.holders[who], lease) == len(items)

    @rule(who=people, wanted=keys)
    def drop(self, who: int, wanted: list[bytes]) -> None:
        done = 0
        for key in wanted:
            item = self.model.items.get(key)
            if item is not None and item.writer in (None, who):
                self.model.forget(key)
                done += 1
        assert self.index.drop(self.holders[who], wanted) == done

    @rule(who=people)
    def end(self, who: int) -> None:
        pinned = [item for items in self.leases[who].values() for item in items]
        for item in list(self.model.items.values()):
            if item.writer == who:
                self.model.forget(item.key).pins += 1
                pinned.append(item)
        self.leases[who].clear()
        self.ended.append((self.now + GRACE, pinned))
        self.index.end(self.holders[who], self.now)
        self.holders[who] = Holder(str(who), "model")

    def settle(self) -> None:
        due = [items for when, items in self.ended if when <= self.now]
        self.ended = [(when, items) for when, items in self.ended if when > self.now]
        for item in (item for items in due for item in items):
            item.pins -= 1

    @invariant()
    def states_agree(self) -> None:
        expected = tuple(
            "miss" if k not in self.model.items else "hit" if self.model.items[k].writer is None else "pending"
            for k in KEYS
        )
        assert self.index.lookup(KEYS) == expected

    @invariant()
    def scores_agree(self) -> None:
        for item in self.model.items.values():
            stored = self.index.find(item.key)
            assert stored is not None
            assert (stored.score, stored.shared) == (item.score, item.shared)

    @invariant()
    def counts_agree(self) -> None:
        counts, items = self.index.counts(), list(self.model.items.values())
        alive = items + [item for item in self.model.forgotten if item.pins]
        assert counts.objects == sum(item.writer is None for item in items)
        assert counts.reserved == sum(item.writer is not None for item in items)
        assert counts.leased == sum(item.pins > 0 for item in alive)
        assert counts.unsaved_bytes == sum(UNITS[item.key] * UNIT for item in items if item.writer is None)
        assert counts.used_bytes == (ARENA_UNITS - self.model.free()) * UNIT

    @invariant()
    def bytes_in_use_are_disjoint(self) -> None:
        alive = [*self.model.items.values(), *(item for item in self.model.forgotten if item.pins)]
        taken = sorted((e.offset, e.offset + rounded(e.length)) for item in alive for e in self.extents[id(item)][1])
        assert all(end <= start for (_, end), (start, _) in pairwise(taken))


IndexMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestIndexAgainstModel = IndexMachine.TestCase
