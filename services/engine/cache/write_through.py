"""Copies every new device block and checkpoint to the kvstore in the background: evicting it later costs nothing."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from services.engine.batch import Transfer
from services.engine.cache.arena import Arena
from services.engine.cache.block_pool import BlockPool
from services.engine.cache.checkpoints import Checkpoint, Checkpoints
from services.engine.cache.content import Block
from services.engine.cache.kv_client import KvClient
from services.engine.cache.recompute_cost import RecomputeCost
from services.engine.mailbox import KvReserved
from services.protocol import worth
from services.protocol.kv import Entry, Extent, Key


@dataclass(frozen=True, slots=True)
class _Store:
    what: Block | Checkpoint
    key: Key
    page: int
    """Held until the store is over; -1: none (a checkpoint at a block's border)."""
    state: int
    """Slot of the checkpoint, which is pinned until the store is over; -1 for a block."""


@dataclass(frozen=True, slots=True)
class _Copy:
    store: _Store
    arena: Arena
    extents: tuple[Extent, ...]


class WriteThrough:
    """offered -> reserved (asked, answered) -> copied -> committed; between the first and the last at most `limit`
    blocks and `state_limit` checkpoints.

    An offered block that is evicted before its turn is forgotten; so is a checkpoint that has become useless or was
    superseded. So is all that waits when the store goes away: it comes back empty, and then all that is on the device
    is offered anew.
    """

    def __init__(
        self,
        pool: BlockPool,
        checkpoints: Checkpoints,
        kv: KvClient,
        cost: RecomputeCost,
        tags: Iterator[int],
        transfer_ids: Iterator[int],
        page_bytes: int,
        state_bytes: int,
        limit: int,
        state_limit: int,
    ) -> None:
        self._pool = pool
        self._checkpoints = checkpoints
        self._kv = kv
        self._cost = cost
        self._tags = tags
        self._transfer_ids = transfer_ids
        self._page_bytes = page_bytes
        self._state_bytes = state_bytes
        self._limit = limit
        self._state_limit = state_limit
        self._offered: deque[Block] = deque()
        self._offered_states: deque[Checkpoint] = deque()
        self._pinned: deque[_Store] = deque()
        self._asked: dict[int, list[_Store]] = {}
        self._ready: deque[_Copy] = deque()
        self._copying: dict[int, _Copy] = {}
        self._busy: set[Key] = set()
        self._busy_states = 0
        self.stored = 0
        """Blocks committed since the start."""
        self.stored_checkpoints = 0
        """Checkpoints committed since the start."""

    @property
    def copying(self) -> int:
        """Transfers under way."""
        return len(self._copying)

    @property
    def idle(self) -> bool:
        """No page or slot is held and none is about to be."""
        offered = bool(self._offered or self._offered_states)
        return not self._busy and not (offered and self._kv.arena is not None)

    def offer(self, what: Block | Checkpoint) -> None:
        """It is on the device, its bytes complete. Of checkpoints as many as may be under way are pinned at once: when
        a request is preempted, the one in need takes pages in this very step."""
        if self._kv.arena is None:
            return
        if isinstance(what, Block):
            self._offered.append(what)
            self._pool.to_be_kept(what.name, True)
        else:
            self._offered_states.append(what)
            self._expect(what, True)
            self._pin_states()

    def connected(self) -> None:
        """A store is there that knows nothing of what we hold."""
        self._pool.kept_here_only()
        self._offered = deque(self._pool.blocks())
        for block in self._offered:
            self._pool.to_be_kept(block.name, True)
        self._offered_states = deque(self._checkpoints.all())
        for checkpoint in self._offered_states:
            self._expect(checkpoint, True)

    def ask(self) -> None:
        """Reserve room for as many offered blocks and checkpoints as may be under way, blocks first: a checkpoint
        without its blocks is of no use there either."""
        if self._kv.arena is None:
            for block in self._offered:
                self._pool.to_be_kept(block.name, False)
            for checkpoint in self._offered_states:
                self._expect(checkpoint, False)
            self._offered.clear()
            self._offered_states.clear()
        stores: list[_Store] = []
        while self._offered and len(self._busy) - self._busy_states < self._limit:
            block = self._offered.popleft()
            page = self._pool.find(block.name)
            if page is None or block.name in self._busy:
                continue
            self._pool.acquire((page,))
            self._busy.add(block.name)
            stores.append(_Store(block, block.name, page, -1))
        if not self._offered:
            self._pin_states()
            stores += self._pinned
            self._pinned.clear()
        if not stores:
            return
        tag = next(self._tags)
        self._asked[tag] = stores
        self._kv.reserve(tag, [self._entry(store) for store in stores])

    def _pin_states(self) -> None:
        """Take as many of the offered checkpoints as may be under way."""
        while self._offered_states and self._busy_states < self._state_limit:
            checkpoint = self._offered_states.popleft()
            key, waste = checkpoint.mark.key, checkpoint.superseded or checkpoint.stored
            if key in self._busy:
                continue
            if waste or not self._checkpoints.of_use(checkpoint):
                self._expect(checkpoint, False)
                continue
            self._checkpoints.pin(checkpoint)
            self._busy.add(key)
            self._busy_states += 1
            self._pinned.append(_Store(checkpoint, key, self._checkpoints.tail(checkpoint), checkpoint.slot))

    def _expect(self, checkpoint: Checkpoint, pending: bool) -> None:
        """Whether a checkpoint is about to be copied: slot and tail had better stay until it is."""
        checkpoint.pending = pending
        self._pool.to_be_kept(checkpoint.mark.key, pending)

    def _entry(self, store: _Store) -> Entry:
        what = store.what
        if isinstance(what, Block):
            owner = None if self._pool.shared(what.name) else self._pool.owner(what.name)
            return Entry(
                key=what.name,
                length=self._page_bytes,
                cost=self._cost.of(what.depth),
                parent=what.parent,
                chance=worth.SHARED if owner is None else owner.chance,
            )
        mark = what.mark
        owner = None if what.shared else what.owner
        return Entry(
            key=store.key,
            length=self._state_bytes + (self._page_bytes if mark.tail else 0),
            cost=self._cost.between(what.base, mark.position),
            parent=mark.block if mark.full else b"",
            chance=worth.SHARED if owner is None else owner.chance,
        )

    def reserved(self, message: KvReserved) -> None:
        stores = self._asked.pop(message.tag, None)
        if stores is None:
            raise ValueError(f"a reply to reserve {message.tag}, which was not asked or is answered already")
        nothing = sum(extents is None for extents in message.extents)
        for index, store in enumerate(stores):
            extents = message.extents[index] if index < len(message.extents) else None
            if extents is not None and message.arena is not None:
                self._ready.append(_Copy(store, message.arena, extents))
                continue
            if message.arena is not None and message.full in (0, nothing):  # else nobody knows which of them it has
                self._kept(store, refused=message.full > 0)
            self._end(store, again=False)

    def _kept(self, store: _Store, refused: bool = False) -> None:
        """The kvstore has it; `refused`: it will not."""
        self._pool.kept_elsewhere(store.key, refused)
        if isinstance(store.what, Checkpoint):
            store.what.stored = not refused

    def transfer(self) -> Transfer | None:
        """The next copy to start."""
        while self._ready:
            copy = self._ready.popleft()
            if copy.arena is not self._kv.arena:  # the promise of room went with the connection
                self._end(copy.store, again=True)
                continue
            transfer_id = next(self._transfer_ids)
            self._copying[transfer_id] = copy
            return Transfer(transfer_id, "store", copy.store.page, copy.arena, copy.extents, copy.store.state)
        return None

    def complete(self, done: set[int], failed: set[int]) -> None:
        """Transfers ended; ids that are not ours are passed over."""
        committed: list[Key] = []
        dropped: list[Key] = []
        for transfer_id in sorted(done | failed):
            copy = self._copying.pop(transfer_id, None)
            if copy is None:
                continue
            store = copy.store
            # A connection must not be told of another one's room: it could hold a like-named, unwritten object.
            current = copy.arena is self._kv.arena
            if current and transfer_id in done:
                committed.append(store.key)
                self._kept(store)
                if isinstance(store.what, Checkpoint):
                    self.stored_checkpoints += 1
                else:
                    self.stored += 1
            elif current:
                dropped.append(store.key)
            self._end(store, again=not current)
        if committed:
            self._kv.commit(tuple(committed))
        if dropped:
            self._kv.drop(tuple(dropped))

    def _end(self, store: _Store, again: bool) -> None:
        self._busy.discard(store.key)
        if isinstance(store.what, Checkpoint):
            self._busy_states -= 1
            self._expect(store.what, False)
            self._checkpoints.unpin(store.what)
        else:
            self._pool.to_be_kept(store.key, False)
            self._pool.release((store.page,))
        if again:
            self.offer(store.what)
