"""Who is given up for whom: the pool of pages against a plain model of the rule that its docstring states.

The model knows no heap and no void entries: it weighs all cached pages anew whenever one is given up.
"""

import math
from dataclasses import dataclass, field
from typing import Any, get_args

from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.engine.cache.block_pool import BlockPool
from services.engine.cache.content import PENDING_BITS, STORED_BITS, USELESS_BITS, Block
from services.engine.cache.owners import Owner
from services.engine.cache.recompute_cost import weight
from services.protocol import worth
from services.protocol.generate import Standing

PAGES = 6
SESSIONS = 3
PROGRAMS = settings(max_examples=200, derandomize=True, deadline=None, database=None)


@dataclass(slots=True)
class Kept:
    """What the model knows of a page with a name."""

    block: Block
    used: float
    users: set[str]
    owner: Owner
    held: int = 0
    stored: bool = False
    pending: bool = False


@dataclass
class Model:
    recurrent: bool
    kept: dict[bytes, Kept] = field(default_factory=dict)
    resumable: set[bytes] = field(default_factory=set)

    def followed(self, name: bytes) -> bool:
        return any(other.block.parent == name for other in self.kept.values())

    def value(self, name: bytes, now: float) -> float:
        """log2 of (cost * chance * decay), as services.protocol.worth says it, and what the pool adds."""
        kept = self.kept[name]
        start = 64 * kept.block.depth
        chance = 1.0 if len(kept.users) > 1 else worth.chance(kept.owner.standing)
        value = math.log2(weight(start, start + 64) * chance) - (now - kept.used) / worth.HALF_LIFE
        value += PENDING_BITS * kept.pending - STORED_BITS * kept.stored
        return value - USELESS_BITS * (self.recurrent and name not in self.resumable)

    def candidates(self, now: float) -> dict[bytes, float]:
        """Those that may be given up now, with what they are worth."""
        free = [name for name, kept in self.kept.items() if not kept.held]
        leaves = [name for name in free if not self.followed(name)]
        return {name: self.value(name, now) for name in leaves or free}


class Both:
    """Pool and model, which get the same."""

    def __init__(self, recurrent: bool) -> None:
        self.now = 5000.0
        self.pool = BlockPool(PAGES, recurrent, clock=lambda: self.now)
        self.model = Model(recurrent)
        self.owners = [Owner(f"session {index}", "idle") for index in range(SESSIONS)]

    def take(self, count: int) -> list[int]:
        """Pages, one by one, so that each victim is judged. They are held."""
        pages: list[int] = []
        for _ in range(min(count, self.pool.available)):
            candidates = self.model.candidates(self.now)
            pages += self.pool.allocate(1)
            stored, removed = self.pool.take_changes()
            assert not stored
            for name in removed:
                assert candidates[name] <= min(candidates.values()) + 1e-6, (name, candidates)
                del self.model.kept[name]
        self.pool.check_integrity()
        return pages

    def press(self, count: int) -> None:
        """Somebody takes all free pages and `count` more, and gives them back with nothing in them."""
        free = self.pool.size - len(self.model.kept)
        self.pool.release(self.take(free + count))

    def use(self, session: int, chain: str, length: int, own: bool) -> None:
        """A request of a session over the first blocks of a chain; with `own` of one that no other session has. It
        leaves a checkpoint at its end."""
        chain = f"{session}{chain}" if own else chain
        owner, pages, names = self.owners[session], list[int](), list[bytes]()
        for depth in range(min(length, len(chain))):
            block = Block(chain[: depth + 1].encode(), chain[:depth].encode(), depth)
            page = self.pool.find(block.name)
            if page is None:
                taken = self.take(1)
                if not taken:
                    break
                (page,) = taken
                assert self.pool.name(page, block, owner)
                self.pool.take_changes()
                self.model.kept[block.name] = Kept(block, self.now, {owner.session}, owner, held=1)
            else:
                self.pool.acquire([page])
                self.model.kept[block.name].held += 1
            pages.append(page)
            names.append(block.name)
        self.pool.release(pages, owner)
        if names:
            self.pool.resumable(names[-1], True)
            self.model.resumable.add(names[-1])
        for name in names:
            kept = self.model.kept[name]
            kept.held -= 1
            kept.used = self.now
            kept.users.add(owner.session)
            kept.owner = owner
        self.pool.check_integrity()

    def stands(self, session: int, standing: Standing) -> None:
        owner = self.owners[session]
        if owner.becomes(standing):
            self.pool.weigh(owner)

    def marked(self, which: int, what: str) -> None:
        """Something is heard of a block that is there, or done with it."""
        if not self.model.kept:
            return
        name = sorted(self.model.kept)[which % len(self.model.kept)]
        kept, page = self.model.kept[name], self.pool.find(name)
        assert page is not None
        match what:
            case "stored" | "refused":
                self.pool.kept_elsewhere(name, refused=what == "refused")
                kept.stored = what == "stored"
            case "pending" | "copied":
                self.pool.to_be_kept(name, what == "pending")
                kept.pending = what == "pending"
            case "not resumable":
                self.pool.resumable(name, False)
                self.model.resumable.discard(name)
            case "held":
                self.pool.acquire([page])
                kept.held += 1
            case "let go" if kept.held:
                self.pool.release([page])
                kept.held -= 1
        self.pool.check_integrity()

    def store_is_lost(self) -> None:
        self.pool.kept_here_only()
        for kept in self.model.kept.values():
            kept.stored = False


# Chains that share beginnings: "aab" and "aaa" have two blocks in common.
CHAINS = ("aaa", "aab", "abb", "b", "c")
USES = st.tuples(
    st.just("use"), st.integers(0, SESSIONS - 1), st.sampled_from(CHAINS), st.integers(1, 3), st.booleans()
)
MARKS = st.sampled_from(
    ["stored", "refused", "pending", "copied", "not resumable", "not resumable", "held", "let go", "let go"]
)
ACTIONS: st.SearchStrategy[tuple[Any, ...]] = st.one_of(
    USES,
    USES,
    st.tuples(st.just("stands"), st.integers(0, SESSIONS - 1), st.sampled_from(get_args(Standing))),
    st.tuples(st.just("marked"), st.integers(0, 20), MARKS),
    st.tuples(st.just("press"), st.integers(1, 3)),
    st.tuples(st.just("passes"), st.sampled_from([0.5, 30.0, 700.0, 4000.0])),
    st.tuples(st.just("lost")),
)
# A session's context has lost its end, and then the session is done: what is left must be weighed as well.
SHORTENED: list[tuple[Any, ...]] = [
    ("stands", 0, "waiting"),
    ("use", 0, "aaa", 3, True),
    ("stands", 1, "one_off"),
    ("use", 1, "b", 2, True),
    ("marked", 4, "held"),
    ("press", 1),
    ("stands", 0, "finished"),
    ("marked", 3, "let go"),
    ("press", 1),
]
# What was used last loses its checkpoint, and is of no use from then on.
USELESS: list[tuple[Any, ...]] = [
    ("use", 0, "abb", 1, False),
    ("passes", 30.0),
    ("use", 1, "c", 1, False),
    ("passes", 30.0),
    ("use", 2, "b", 1, False),
    ("press", 1),
    ("marked", 0, "not resumable"),
    ("press", 1),
]


@PROGRAMS
@example(False, SHORTENED)
@example(True, USELESS)
@given(st.booleans(), st.lists(ACTIONS, min_size=10, max_size=50))
def test_who_goes_is_an_end_of_least_worth(recurrent: bool, program: list[tuple[Any, ...]]) -> None:
    both = Both(recurrent)
    for what, *values in program:
        match what:
            case "use":
                both.use(*values)
            case "stands":
                both.stands(*values)
            case "marked":
                both.marked(*values)
            case "press":
                both.press(*values)
            case "passes":
                both.now += values[0]
            case "lost":
                both.store_is_lost()


STEPS = st.lists(
    st.tuples(st.sampled_from(["agent", "title", "sub"]), st.integers(1, 4), st.sampled_from([0.0, 5.0, 60.0])),
    min_size=1,
    max_size=12,
)


@PROGRAMS
@given(STEPS)
def test_an_agent_that_waits_loses_nothing_to_what_hardly_comes_back(steps: list[tuple[str, int, float]]) -> None:
    """However many side requests and sub-agents come after it, within minutes: they push out each other. And no block
    outlives the one before it."""
    now = 1000.0
    pool = BlockPool(9, clock=lambda: now)
    agent = Owner("agent", "waiting")
    kept = 0
    for number, (kind, wanted, passed) in enumerate(steps):
        owner = agent if kind == "agent" else Owner(f"{kind} {number}", "one_off" if kind == "title" else "finished")
        chain, length = str(number), wanted
        if kind == "agent":
            chain, length = "agent", max(kept, wanted)
            kept = length
        pages: list[int] = []
        for depth in range(length):
            name, parent = f"{chain}/{depth}".encode(), f"{chain}/{depth - 1}".encode() if depth else b""
            page = pool.find(name)
            if page is None:
                (page,) = pool.allocate(1)
                assert pool.name(page, Block(name, parent, depth), owner)
            else:
                pool.acquire([page])
            pages.append(page)
        pool.release(pages, owner)
        now += passed
        assert all(pool.find(f"agent/{depth}".encode()) is not None for depth in range(kept)), "given up"
        names = {block.name for block in pool.blocks()}
        assert all(not block.parent or block.parent in names for block in pool.blocks()), "a child outlived its parent"


@PROGRAMS
@given(st.permutations(range(4)), st.sets(st.integers(0, 3)))
def test_what_the_store_has_as_well_goes_before_what_is_nowhere_else(order: list[int], stored: set[int]) -> None:
    """Of four contexts alike, used at the same time."""
    pool = BlockPool(4, clock=lambda: 1000.0)
    for number in order:
        pages = pool.allocate(1)
        assert pool.name(pages[0], Block(f"{number}".encode(), b"", 0))
        pool.release(pages, Owner(f"session {number}", "idle"))
    for number in stored:
        pool.kept_elsewhere(f"{number}".encode())
    pool.take_changes()
    gone: list[int] = []
    for _ in range(4):
        pool.allocate(1)
        gone += [int(name) for name in pool.take_changes()[1]]
    assert set(gone[: len(stored)]) == stored
