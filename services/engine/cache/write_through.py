"""Copies every new device block to the kvstore in the background, so that evicting it later costs nothing."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from services.engine.batch import Transfer
from services.engine.cache.arena import Arena
from services.engine.cache.block_pool import Block, BlockPool
from services.engine.cache.kv_client import KvClient
from services.engine.cache.recompute_cost import RecomputeCost
from services.engine.mailbox import KvReserved
from services.protocol.kv import Entry, Extent


@dataclass(frozen=True, slots=True)
class _Store:
    block: Block
    page: int
    """Held until the store is over."""


@dataclass(frozen=True, slots=True)
class _Copy:
    store: _Store
    arena: Arena
    extents: tuple[Extent, ...]


class WriteThrough:
    """offered -> reserved (asked, answered) -> copied -> committed; at most `limit` blocks between the first and last.

    An offered block that is evicted before its turn is forgotten. So is all that waits when the store goes away: it
    comes back empty, and then all blocks on the device are offered anew.
    """

    def __init__(
        self,
        pool: BlockPool,
        kv: KvClient,
        cost: RecomputeCost,
        tags: Iterator[int],
        transfer_ids: Iterator[int],
        page_bytes: int,
        limit: int,
    ) -> None:
        self._pool = pool
        self._kv = kv
        self._cost = cost
        self._tags = tags
        self._transfer_ids = transfer_ids
        self._page_bytes = page_bytes
        self._limit = limit
        self._offered: deque[Block] = deque()
        self._asked: dict[int, list[_Store]] = {}
        self._ready: deque[_Copy] = deque()
        self._copying: dict[int, _Copy] = {}
        self._busy: set[bytes] = set()
        self.stored = 0
        """Blocks committed since the start."""

    @property
    def copying(self) -> int:
        """Transfers under way."""
        return len(self._copying)

    @property
    def idle(self) -> bool:
        """No page is held and none is about to be."""
        return not self._busy and not (self._offered and self._kv.arena is not None)

    def offer(self, block: Block) -> None:
        """The block is on the device, its bytes complete."""
        if self._kv.arena is not None:
            self._offered.append(block)

    def connected(self) -> None:
        """A store is there that knows nothing of what we hold."""
        self._offered = deque(self._pool.blocks())

    def ask(self) -> None:
        """Reserve room for as many offered blocks as may be under way."""
        if self._kv.arena is None:
            self._offered.clear()
        stores: list[_Store] = []
        while self._offered and len(self._busy) < self._limit:
            block = self._offered.popleft()
            page = self._pool.find(block.name)
            if page is None or block.name in self._busy:
                continue
            self._pool.acquire((page,))
            self._busy.add(block.name)
            stores.append(_Store(block, page))
        if not stores:
            return
        tag = next(self._tags)
        self._asked[tag] = stores
        entries = tuple(
            Entry(
                key=store.block.name,
                length=self._page_bytes,
                cost=self._cost.of(store.block.depth),
                parent=store.block.parent,
            )
            for store in stores
        )
        self._kv.reserve(tag, entries)

    def reserved(self, message: KvReserved) -> None:
        stores = self._asked.pop(message.tag, None)
        if stores is None:
            raise ValueError(f"a reply to reserve {message.tag}, which was not asked or is answered already")
        for index, store in enumerate(stores):
            extents = message.extents[index] if index < len(message.extents) else None
            if extents is not None and message.arena is not None:
                self._ready.append(_Copy(store, message.arena, extents))
            else:
                self._end(store, again=False)

    def transfer(self) -> Transfer | None:
        """The next copy to start."""
        while self._ready:
            copy = self._ready.popleft()
            if copy.arena is not self._kv.arena:  # the promise of room went with the connection
                self._end(copy.store, again=True)
                continue
            transfer_id = next(self._transfer_ids)
            self._copying[transfer_id] = copy
            return Transfer(transfer_id, "store", copy.store.page, copy.arena, copy.extents)
        return None

    def complete(self, done: set[int], failed: set[int]) -> None:
        """Transfers ended; ids that are not ours are passed over."""
        committed: list[bytes] = []
        dropped: list[bytes] = []
        for transfer_id in sorted(done | failed):
            copy = self._copying.pop(transfer_id, None)
            if copy is None:
                continue
            name = copy.store.block.name
            # A connection must not be told of another one's room: it could hold a like-named, unwritten block.
            current = copy.arena is self._kv.arena
            if current:
                (committed if transfer_id in done else dropped).append(name)
            self._end(copy.store, again=not current)
        if committed:
            self.stored += len(committed)
            self._kv.commit(tuple(committed))
        if dropped:
            self._kv.drop(tuple(dropped))

    def _end(self, store: _Store, again: bool) -> None:
        self._busy.discard(store.block.name)
        self._pool.release((store.page,), used=False)
        if again:
            self.offer(store.block)
