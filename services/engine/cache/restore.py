"""Brings blocks that the kvstore has back to the device before their request runs."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.engine.batch import Transfer
from services.engine.cache.arena import Arena
from services.engine.cache.block_pool import Block, BlockPool
from services.engine.cache.kv_client import KvClient
from services.engine.cache.prefix_cache import BlockChain, PrefixCache
from services.engine.mailbox import KvLeased
from services.protocol.kv import Extent


@dataclass(frozen=True, slots=True)
class Restored:
    """The end of a restore: the caller takes over the hold of `pages`."""

    request_id: str
    pages: list[int]
    """A prefix of the request's blocks, all of them named."""
    host: int
    """How many of `pages`, at their end, came from the kvstore."""
    no_room: bool = False
    """The store has blocks, but the pool has no pages for them just now; nothing was loaded."""


@dataclass(slots=True, eq=False)
class _Restore:
    request_id: str
    chain: BlockChain
    pages: list[int]
    """Held: first the blocks that the device had, then those that are loaded."""
    on_device: int
    asked: Block
    lease: int = 0
    under_way: int = 0
    missing: set[int] = field(default_factory=set)
    """Indices into `pages` that could not be loaded."""
    abandoned: bool = False


@dataclass(frozen=True, slots=True)
class _Load:
    restore: _Restore
    index: int
    arena: Arena
    extents: tuple[Extent, ...]


class Restores:
    """asked -> leased -> loading -> restored. Every restore ends in one Restored, unless it is abandoned.

    A page that is being loaded stays held, and the lease kept, until the last transfer has come back, also where the
    request is gone by then: a copy that is under way cannot be called off.
    """

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        kv: KvClient,
        tags: Iterator[int],
        transfer_ids: Iterator[int],
        limit: int,
    ) -> None:
        """`limit`: loads under way at most."""
        self._pool = pool
        self._cache = cache
        self._kv = kv
        self._tags = tags
        self._transfer_ids = transfer_ids
        self._limit = limit
        self._asked: dict[int, _Restore] = {}
        self._of: dict[str, _Restore] = {}
        self._first_names: set[bytes] = set()
        self._ready: deque[_Load] = deque()
        self._loading: dict[int, _Load] = {}
        self._ended: list[Restored] = []
        self.loaded = 0
        """Blocks loaded since the start."""

    @property
    def loading(self) -> int:
        """Transfers under way."""
        return len(self._loading)

    @property
    def idle(self) -> bool:
        """No page and no lease is held."""
        return not (self._asked or self._of or self._ready or self._loading or self._ended)

    def under_way(self, block: Block) -> bool:
        """Whether another request's restore begins with this block: better wait for it than load it twice."""
        return block.name in self._first_names

    def held(self, request_id: str) -> int:
        """Pages that a request's restore holds."""
        return len(self._of[request_id].pages)

    def ask(self, request_id: str, chain: BlockChain, pages: list[int], trace: str) -> None:
        """Look for the chain's blocks behind `pages`, whose hold passes to the restore."""
        tag = next(self._tags)
        blocks = [chain.block(depth) for depth in range(len(pages), chain.full)]
        restore = _Restore(request_id, chain, pages, len(pages), blocks[0])
        self._asked[tag] = restore
        self._of[request_id] = restore
        self._first_names.add(restore.asked.name)
        self._kv.lease(tag, tuple(block.name for block in blocks), trace)

    def leased(self, message: KvLeased) -> None:
        restore = self._asked.pop(message.tag, None)
        if restore is None:
            raise ValueError(f"a reply to lease {message.tag}, which was not asked or is answered already")
        restore.lease = message.lease
        extents = message.extents
        if restore.abandoned or message.arena is None or not extents:
            self._end(restore)
            return
        # Others may have computed or restored some of these blocks meanwhile.
        found = self._cache.match(restore.chain, restore.on_device)[: len(extents)]
        self._pool.acquire(found)
        restore.pages += found
        restore.on_device += len(found)
        wanted = extents[len(found) :]
        if len(wanted) > self._pool.available:
            self._end(restore, no_room=True)
            return
        first = len(restore.pages)
        restore.pages += self._pool.allocate(len(wanted))
        restore.under_way = len(wanted)
        for index, where in enumerate(wanted, first):
            self._ready.append(_Load(restore, index, message.arena, where))
        if not wanted:
            self._end(restore)

    def abandon(self, request_id: str) -> None:
        """The request is gone. Loads that were not started are not started any more."""
        restore = self._of.pop(request_id)
        restore.abandoned = True
        for restored in self._ended:
            if restored.request_id == request_id:
                self._ended.remove(restored)
                self._pool.release(restored.pages)
                return
        if restore.under_way == 0:  # not answered yet
            self._pool.release(restore.pages)
            restore.pages, restore.on_device = [], 0
            return
        waiting = [load for load in self._ready if load.restore is restore]
        self._ready = deque(load for load in self._ready if load.restore is not restore)
        for load in waiting:
            self._fail(load)

    def transfer(self) -> Transfer | None:
        """The next copy to start."""
        while self._ready and len(self._loading) < self._limit:
            load = self._ready.popleft()
            if load.arena is not self._kv.arena:  # the lease went with the connection
                self._fail(load)
                continue
            transfer_id = next(self._transfer_ids)
            self._loading[transfer_id] = load
            return Transfer(transfer_id, "load", load.restore.pages[load.index], load.arena, load.extents)
        return None

    def complete(self, done: set[int], failed: set[int]) -> None:
        """Transfers ended; ids that are not ours are passed over."""
        for transfer_id in sorted(done | failed):
            load = self._loading.pop(transfer_id, None)
            if load is None:
                continue
            if transfer_id in done and load.arena is self._kv.arena:  # else the lease may have ended before the copy
                self.loaded += 1
                self._ended_load(load.restore)
            else:
                self._fail(load)

    def take_restored(self) -> list[Restored]:
        """Restores that ended since the last call."""
        ended, self._ended = self._ended, []
        for restored in ended:
            del self._of[restored.request_id]
        return ended

    def _fail(self, load: _Load) -> None:
        load.restore.missing.add(load.index)
        self._ended_load(load.restore)

    def _ended_load(self, restore: _Restore) -> None:
        restore.under_way -= 1
        if restore.under_way == 0:
            self._end(restore)

    def _end(self, restore: _Restore, no_room: bool = False) -> None:
        if restore.lease:
            self._kv.release(restore.lease)
        self._first_names.discard(restore.asked.name)
        whole = min(restore.missing, default=len(restore.pages))
        for index in range(restore.on_device, whole):
            restore.pages[index], _ = self._cache.insert(restore.chain.block(index), restore.pages[index])
        self._pool.release(restore.pages[whole:], used=False)
        pages = restore.pages[:whole]
        if restore.abandoned:
            self._pool.release(pages)
        else:
            self._ended.append(Restored(restore.request_id, pages, whole - restore.on_device, no_room))
