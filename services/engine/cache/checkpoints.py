"""Recurrent states: who holds the slots, and which exact prefixes have a checkpoint. Bookkeeping only."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from services.engine.cache.block_pool import BlockPool
from services.engine.cache.content import PENDING_BITS, STORED_BITS, Block
from services.engine.cache.owners import Owner
from services.engine.cache.prefix_cache import BlockChain
from services.engine.cache.recompute_cost import weight
from services.protocol import worth
from services.protocol.hashing import BLOCK_TOKENS, BlockHash, extend
from services.protocol.kv import Key, state_key

REMEMBERED = 4096
"""Checkpoints that are in the kvstore only and whose positions we still know, at most."""
SUPERSEDED_BITS = 8.0
"""A superseded checkpoint is worth 1/256: by `worth.HALF_LIFE`, another one is kept 80 minutes longer."""


class Mark(NamedTuple):
    """The name of one exact prefix of a chain."""

    key: Key
    position: int
    """Tokens in the prefix."""
    block: BlockHash
    """Its last full block; the chain's root where there is none."""
    tail: tuple[int, ...]
    """The tokens behind that block."""

    @classmethod
    def of(cls, chain: BlockChain, position: int) -> "Mark":
        full = position // BLOCK_TOKENS
        block = chain.end(full)
        tail = chain.ids(full * BLOCK_TOKENS, position)
        return cls(state_key(extend(block, tail) if tail else block, position), position, block, tail)

    @property
    def full(self) -> int:
        """Full blocks in the prefix."""
        return self.position // BLOCK_TOKENS


class Checkpoint:
    """The state behind one exact prefix. All fields are the Checkpoints' to change."""

    __slots__ = (
        "before",
        "last_use",
        "mark",
        "owner",
        "pending",
        "pins",
        "root",
        "shared",
        "slot",
        "stored",
        "superseded",
        "uses",
    )

    def __init__(self, mark: Mark, slot: int, before: "Checkpoint | None", root: bool) -> None:
        self.mark = mark
        self.slot = slot
        """-1: not on the device."""
        self.before = before
        """The one before it in its context."""
        self.root = root
        """It ends where conversations part: never superseded."""
        self.pins = 0
        """Copies and transfers that read it."""
        self.uses = 0
        """Requests that went on from it."""
        self.last_use = 0.0
        self.owner: Owner | None = None
        """The session that used it last; None: it came from the kvstore, and none has yet."""
        self.shared = root
        """Several sessions have used it, or will."""
        self.superseded = False
        self.pending = False
        """It is about to be copied to the kvstore."""
        self.stored = False
        """The kvstore has it, as far as we know."""

    @property
    def kept(self) -> bool:
        """It is on the device or in the kvstore."""
        return self.slot >= 0 or self.stored

    @property
    def base(self) -> int:
        """Position from which on it saves computing: that of the nearest one before it that is kept, superseded ones
        not counted, which are as good as given up."""
        at = self
        while True:
            while at.before is not None and not at.before.kept:
                at.before = at.before.before
            if at.before is None:
                return 0
            at = at.before
            if not at.superseded:
                return at.mark.position


class Checkpoints:
    """Slots 0..n-1, each free, held by a request (or a copy under way to it), or a checkpoint's.

    A checkpoint of a prefix is a slot (state, convolution columns, last hidden vector) and, where the prefix ends
    inside a block, a page with its own copy of that partial block. It names the full blocks of the prefix and holds
    none of them: it is usable only while all are on the device. The tail's page is a cached page of the pool like any
    other, so pages are never short because of checkpoints, and a checkpoint without its tail is as useless as one
    without its blocks.

    A slot is taken from the checkpoint of least worth (`services.protocol.worth`: cost of computing from the
    checkpoint before it, chance that its session comes back, time since its last use), first of all from one that is
    useless, and rather from a superseded one. Pinned ones stay.

    A checkpoint is superseded when a request ran past it: it then serves only who branches off there. It is not when
    at least two requests went on from it, or when it is a `root`. A later use makes it as good as new.

    What left the device but is in the kvstore is remembered by its name (REMEMBERED, longest unused first out).

    Owned by the core's thread. With n = 0 (a model without recurrent state) nothing is ever found.
    """

    def __init__(self, pool: BlockPool, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.size = slots
        self._pool = pool
        self._free = list(range(slots - 1, -1, -1))
        self._held: set[int] = set()
        self._by_key: dict[Key, Checkpoint] = {}
        self._by_block: dict[BlockHash, list[Checkpoint]] = {}
        self._on_device: dict[Key, Checkpoint] = {}
        self._remembered: dict[Key, Checkpoint] = {}
        self._clock = clock
        self.published = 0
        """Checkpoints that came to the device since the start, computed or restored."""
        self.evictions = 0
        """Checkpoints that were given up for other states since the start."""
        self.hits = 0
        """Times that a request went on from a checkpoint since the start."""

    # Slots.

    @property
    def available(self) -> int:
        """Slots that `take` can give."""
        return len(self._free) + sum(not checkpoint.pins for checkpoint in self._on_device.values())

    @property
    def held(self) -> int:
        """Slots that requests and copies have."""
        return len(self._held)

    @property
    def on_device(self) -> int:
        """Slots that checkpoints have."""
        return len(self._on_device)

    def take(self, taker: str = "") -> int | None:
        """A slot, held from now on, for a request of the session `taker`; None when all are held or pinned."""
        if not self._free:
            victims = [checkpoint for checkpoint in self._on_device.values() if not checkpoint.pins]
            if not victims:
                return None
            self._evict(min(victims, key=self._worth), taker)
        slot = self._free.pop()
        self._held.add(slot)
        return slot

    def take_spare(self) -> int | None:
        """A slot, held from now on, that is free or has what hardly anybody will go on from; None where all have more
        than that."""
        if not self._free:
            spare = [each for each in self._on_device.values() if not each.pins and self._spare(each)]
            if not spare:
                return None
            self._evict(min(spare, key=self._worth), "")
        slot = self._free.pop()
        self._held.add(slot)
        return slot

    def _spare(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.superseded or not self.of_use(checkpoint)

    def discard(self, checkpoint: Checkpoint) -> None:
        """Give up a superseded checkpoint that nobody has used, where it is there still."""
        if self.named(checkpoint.mark.key) is checkpoint and self._spare(checkpoint) and not checkpoint.pins:
            self._free.append(checkpoint.slot)
            self._leave_device(checkpoint)

    def give_back(self, slot: int) -> None:
        self._held.remove(slot)
        self._free.append(slot)

    # Checkpoints.

    def publish(
        self,
        mark: Mark,
        slot: int,
        page: int,
        *,
        before: Checkpoint | None = None,
        root: bool = False,
        owner: Owner | None = None,
    ) -> Checkpoint | None:
        """A held slot has the state of this prefix, a held and nameless `page` its tail (-1: it has none), and all
        that wrote them is done. The slot's hold passes over, the page's stays the caller's. None: there is a usable
        checkpoint of this prefix already; the slot is free again. `before`: the one before it in its context; `owner`:
        the session of the request that made it."""
        known = self._by_key.get(mark.key)
        if known is not None and known.slot >= 0:
            if known.pins or self.usable(known):
                self._touch(known, owner)
                self.give_back(slot)
                return None
            self._evict(known, "")
            known = self._by_key.get(mark.key)
        if known is None:
            known = Checkpoint(mark, slot, before, root)
            self._by_key[mark.key] = known
            self._by_block.setdefault(mark.block, []).append(known)
            self._pool.resumable(mark.block, True)
        else:
            known.stored = False  # it was asked for and not found, or it would not have been computed again
        known.slot = slot
        known.root |= root
        known.shared |= root
        self._remembered.pop(mark.key, None)
        self._held.remove(slot)
        self._on_device[mark.key] = known
        self.published += 1
        self._pool.gone.back(mark.key)
        self._touch(known, owner)
        if page >= 0:
            parent = mark.block if mark.full else b""
            self._pool.name(page, Block(mark.key, parent, mark.full, tail=True), owner)
        return known

    def find(self, chain: BlockChain, above: int = 0) -> Checkpoint | None:
        """The deepest usable checkpoint of a prefix of the chain that is longer than `above`; it may be all of it. The
        full blocks up to `above` must be on the device."""
        reach = above // BLOCK_TOKENS
        while reach < chain.full and self._pool.find(chain.end(reach + 1)) is not None:
            reach += 1
        return next((checkpoint for checkpoint in self._along(chain, above, reach) if self.usable(checkpoint)), None)

    def named(self, key: Key) -> Checkpoint | None:
        """The checkpoint of this name that is on the device."""
        return self._on_device.get(key)

    def known(self, chain: BlockChain, above: int) -> list[Mark]:
        """Names of the checkpoints of prefixes longer than `above`, usable or not, the deepest first."""
        return [checkpoint.mark for checkpoint in self._along(chain, above, chain.full)]

    def usable(self, checkpoint: Checkpoint) -> bool:
        """Whether state, tail and last full block are on the device; the blocks before that are so nearly always."""
        mark = checkpoint.mark
        if checkpoint.slot < 0 or (mark.tail and self._pool.find(mark.key) is None):
            return False
        return not mark.full or self._pool.find(mark.block) is not None

    def of_use(self, checkpoint: Checkpoint) -> bool:
        """Whether state and tail are on the device, and the last full block there or in the kvstore."""
        mark = checkpoint.mark
        if checkpoint.slot < 0 or (mark.tail and self._pool.find(mark.key) is None):
            return False
        return not mark.full or self._pool.find(mark.block) is not None or self._pool.gone.stored(mark.block)

    def tail(self, checkpoint: Checkpoint) -> int:
        """The page of its tail; -1 where it has none (any more)."""
        page = self._pool.find(checkpoint.mark.key)
        return -1 if page is None else page

    def pin(self, checkpoint: Checkpoint) -> None:
        """Keep slot and tail as they are until `unpin`."""
        checkpoint.pins += 1
        if (page := self.tail(checkpoint)) >= 0:
            self._pool.acquire((page,))

    def unpin(self, checkpoint: Checkpoint, user: Owner | None = None) -> None:
        """`user`: whose request went on from it; None: nobody's did."""
        checkpoint.pins -= 1
        if (page := self.tail(checkpoint)) >= 0:
            self._pool.release((page,), user)
        if user is not None:
            self.hits += 1
            checkpoint.uses += 1
            self._touch(checkpoint, user)

    def take_over(self, checkpoint: Checkpoint) -> tuple[int, int]:
        """End an unpinned, usable checkpoint and hold its (slot, tail page or -1, nameless) instead."""
        page = self.tail(checkpoint)
        if page >= 0:
            self._pool.acquire((page,))
        slot = checkpoint.slot
        self.hits += 1
        self._leave_device(checkpoint)
        self._held.add(slot)
        return slot, page

    def supersede(self, chain: BlockChain, position: int, spared: set[Key]) -> None:
        """A request has run to `position` and left those checkpoints behind that lie in the blocks before it; not
        counting the `spared` ones, which are its own."""
        for full in range(position // BLOCK_TOKENS + 1):
            for checkpoint in self._by_block.get(chain.end(full), ()):
                if checkpoint.mark.position < position and checkpoint.mark.key not in spared:
                    checkpoint.superseded = not checkpoint.root and checkpoint.uses < 2

    def known_all(self) -> Iterable[Checkpoint]:
        """All on the device, and those in the kvstore that are remembered."""
        return self._by_key.values()

    def all(self) -> list[Checkpoint]:
        """All on the device, the shortest prefix first."""
        return sorted(self._on_device.values(), key=lambda checkpoint: checkpoint.mark.position)

    def forget_store(self) -> None:
        """What the kvstore had is lost."""
        for checkpoint in self._by_key.values():
            checkpoint.stored = False
        for checkpoint in list(self._remembered.values()):
            self._drop(checkpoint)

    def _along(self, chain: BlockChain, above: int, reach: int) -> Iterator[Checkpoint]:
        """All known ones of prefixes longer than `above` with at most `reach` full blocks, the longest first."""
        for full in range(reach, above // BLOCK_TOKENS - 1, -1):
            candidates = self._by_block.get(chain.end(full))
            if not candidates:
                continue
            tail = chain.ids(full * BLOCK_TOKENS, (full + 1) * BLOCK_TOKENS)
            for checkpoint in sorted(candidates, key=lambda candidate: -candidate.mark.position):
                mark = checkpoint.mark
                if mark.position > above and mark.tail == tail[: len(mark.tail)]:
                    yield checkpoint

    def _touch(self, checkpoint: Checkpoint, owner: Owner | None) -> None:
        checkpoint.last_use = self._clock()
        checkpoint.superseded = False
        if owner is not None:
            checkpoint.shared |= checkpoint.owner is not None and checkpoint.owner is not owner
            checkpoint.owner = owner

    def _worth(self, checkpoint: Checkpoint) -> tuple[bool, float]:
        mark, owner = checkpoint.mark, checkpoint.owner
        saved = math.log2(max(weight(checkpoint.base, mark.position), 1.0))
        density = saved - STORED_BITS * checkpoint.stored - SUPERSEDED_BITS * checkpoint.superseded
        density += PENDING_BITS * (checkpoint.pending and not checkpoint.superseded)
        chance = worth.SHARED if checkpoint.shared or owner is None else owner.chance
        return self.of_use(checkpoint), worth.score(density, chance, checkpoint.last_use)

    def _evict(self, checkpoint: Checkpoint, taker: str) -> None:
        slot = checkpoint.slot
        self.evictions += 1
        mark, owner = checkpoint.mark, checkpoint.owner
        session = "" if owner is None else owner.session
        parent = mark.block if mark.full else b""
        self._pool.gone.left(mark.key, parent, mark.full, session=session, taker=taker, stored=checkpoint.stored)
        self._leave_device(checkpoint)
        self._free.append(slot)

    def _leave_device(self, checkpoint: Checkpoint) -> None:
        checkpoint.slot = -1
        del self._on_device[checkpoint.mark.key]
        self._pool.forget_tail(checkpoint.mark.key)
        if not checkpoint.stored:
            self._drop(checkpoint)
            return
        self._remembered[checkpoint.mark.key] = checkpoint
        if len(self._remembered) > REMEMBERED:
            self._drop(next(iter(self._remembered.values())))

    def _drop(self, checkpoint: Checkpoint) -> None:
        """Forget even the name."""
        mark = checkpoint.mark
        self._remembered.pop(mark.key, None)
        del self._by_key[mark.key]
        there = self._by_block[mark.block]
        there.remove(checkpoint)
        if not there:
            del self._by_block[mark.block]
            self._pool.resumable(mark.block, False)

    def check_integrity(self, idle: bool) -> None:
        """Raises AssertionError when the books disagree; `idle`: no request, copy or transfer is under way."""
        taken = [checkpoint.slot for checkpoint in self._on_device.values()]
        slots = [*self._free, *self._held, *taken]
        assert sorted(slots) == list(range(self.size)), "a slot is lost, or has two owners"
        assert not (set(self._on_device) & set(self._remembered)), "a checkpoint is here and not here"
        assert self._by_key.keys() == self._on_device.keys() | self._remembered.keys(), "a name leads nowhere"
        indexed = [checkpoint for there in self._by_block.values() for checkpoint in there]
        assert len(indexed) == len(self._by_key), "the index by blocks disagrees"
        for checkpoint in indexed:
            assert self._by_key[checkpoint.mark.key] is checkpoint
            assert checkpoint.pins >= 0, "unpinned more often than pinned"
            assert checkpoint.slot >= 0 or (checkpoint.pins == 0 and checkpoint.stored)
            if checkpoint.pins and checkpoint.mark.tail:
                page = self.tail(checkpoint)
                assert page >= 0, "a pinned checkpoint lost its tail"
                assert self._pool.held(page), "the tail of a pinned checkpoint may be taken"
        if idle:
            assert not self._held, "slots leaked"
            assert not any(checkpoint.pins for checkpoint in indexed), "a checkpoint is pinned for ever"
