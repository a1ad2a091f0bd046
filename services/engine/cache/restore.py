"""Brings blocks and checkpoints that the kvstore has back to the device before their request runs."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from services.engine.batch import Transfer
from services.engine.cache.arena import Arena
from services.engine.cache.block_pool import BlockPool
from services.engine.cache.checkpoints import Checkpoint, Checkpoints, Mark
from services.engine.cache.content import Block
from services.engine.cache.kv_client import Goal, KvClient
from services.engine.cache.owners import Owner
from services.engine.cache.prefix_cache import BlockChain, PrefixCache
from services.engine.mailbox import KvLeased
from services.protocol.kv import Extent, Key


@dataclass(frozen=True, slots=True)
class Restored:
    """The end of a restore: the caller takes over the hold of `pages`, and one pin of `checkpoint`."""

    request_id: str
    pages: list[int]
    """A prefix of the request's blocks, all of them named."""
    host: int
    """How many of `pages`, mostly those at their end, came from the kvstore."""
    disk: int = 0
    """Those of them that the kvstore had on disk only."""
    checkpoint: Checkpoint | None = None
    """Came from the kvstore too, or waited here for its blocks; these are all in `pages`."""
    again: bool = False
    """The store has something, but there was no room for it just now, or the request that loads it gave up; nothing
    was loaded."""


@dataclass(slots=True, eq=False)
class _Restore:
    request_id: str
    chain: BlockChain
    pages: list[int]
    """Held, a page a block; _HOLE where the device has not got it."""
    wanted: list[int]
    """Depths of the blocks to load, ascending."""
    trace: str
    owner: Owner
    """The session of its request."""
    asked: bytes
    """Name of the first block that the device has not; empty where it has all."""
    marks: tuple[Mark, ...]
    """Positions at which a checkpoint is sought, the deepest first; none with a model without recurrent state."""
    here: dict[Key, Checkpoint] = field(default_factory=dict)
    """Pinned: those of `marks` that are on the device, and only blocks of them are not."""
    mark: Mark | None = None
    """The one to load."""
    kept: Checkpoint | None = None
    """Pinned: that of `mark`, where it is one of those."""
    slot: int = -1
    """Held, for the state."""
    tail: int = -1
    """Held, for the checkpoint's partial page."""
    lease: int = 0
    under_way: int = 0
    from_disk: set[int] = field(default_factory=set)
    """Indices into `pages` that the kvstore had on disk only."""
    missing: set[int] = field(default_factory=set)
    """Indices into `pages` that could not be loaded; _STATE for the checkpoint."""
    abandoned: bool = False

    def names(self) -> list[Key]:
        """Of the blocks to load."""
        return [self.chain.block(depth).name for depth in self.wanted]


_STATE = -1
_HOLE = -1


@dataclass(frozen=True, slots=True)
class _Load:
    restore: _Restore
    index: int
    """Into the restore's pages, or _STATE."""
    arena: Arena
    extents: tuple[Extent, ...]


class Restores:
    """asked -> leased -> loading -> restored. Every restore ends in one Restored, unless it is abandoned.

    With a recurrent model, blocks without a checkpoint behind them save nothing: the deepest checkpoint is leased and
    loaded whose blocks are all here or there, with just these blocks. Of those that want one checkpoint at once, one
    loads it and the others wait for that one's end.

    What is being loaded stays held, and the lease kept, until the last transfer has come back, also where the request
    is gone by then: a copy that is under way cannot be called off.
    """

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        checkpoints: Checkpoints,
        kv: KvClient,
        tags: Iterator[int],
        transfer_ids: Iterator[int],
        limit: int,
    ) -> None:
        """`limit`: loads under way at most."""
        self._pool = pool
        self._cache = cache
        self._checkpoints = checkpoints
        self._kv = kv
        self._tags = tags
        self._transfer_ids = transfer_ids
        self._limit = limit
        self._asked: dict[int, _Restore] = {}
        self._of: dict[str, _Restore] = {}
        self._first_names: set[bytes] = set()
        self._followers: dict[Key, list[_Restore]] = {}
        """Who waits for a checkpoint that another restore loads; an entry for each one that is being loaded."""
        self._ready: deque[_Load] = deque()
        self._loading: dict[int, _Load] = {}
        self._ended: list[Restored] = []
        self.loaded = 0
        """Blocks loaded since the start."""
        self.loaded_checkpoints = 0
        """Checkpoints loaded, with all that belongs to them, since the start."""

    @property
    def loading(self) -> int:
        """Transfers under way."""
        return len(self._loading)

    @property
    def idle(self) -> bool:
        """No page, no slot and no lease is held."""
        return not (self._asked or self._of or self._followers or self._ready or self._loading or self._ended)

    def under_way(self, block: Block) -> bool:
        """Whether another request's restore begins with this block: better wait for it than load it twice."""
        return block.name in self._first_names

    def held(self, request_id: str) -> int:
        """Pages that a request's restore holds."""
        return sum(page != _HOLE for page in self._of[request_id].pages)

    def ask(
        self,
        request_id: str,
        chain: BlockChain,
        pages: list[int],
        owner: Owner,
        trace: str = "",
        marks: Sequence[Mark] = (),
    ) -> None:
        """Look for the chain's blocks behind `pages`, whose hold passes to the restore; with `marks` (the deepest
        first) for a checkpoint at one of these and the blocks up to it."""
        tag = next(self._tags)
        found = list(pages)
        wanted: list[int] = []
        for depth in range(len(pages), chain.full):
            page = self._pool.find(chain.block(depth).name)
            if page is None:
                wanted.append(depth)
                found.append(_HOLE)
            else:  # behind a hole
                self._pool.acquire((page,))
                found.append(page)
        asked = chain.block(wanted[0]).name if wanted else b""
        restore = _Restore(request_id, chain, found, wanted, trace, owner, asked, tuple(marks))
        self._asked[tag] = restore
        self._of[request_id] = restore
        if asked:
            self._first_names.add(asked)
        if not marks:
            self._kv.lease(tag, restore.names(), trace)
            return
        goals: list[Goal] = []
        for mark in marks:
            checkpoint = self._kept(mark)
            if checkpoint is not None:
                self._checkpoints.pin(checkpoint)
                restore.here[mark.key] = checkpoint
            goals.append(Goal(bisect_left(wanted, mark.full), b"" if checkpoint is not None else mark.key))
        self._kv.find(tag, restore.names(), goals, trace)

    def _choose(self, restore: _Restore, goal: int) -> None:
        """Go for the mark of this index, and for none where that is -1."""
        if goal >= 0:
            restore.mark = restore.marks[goal]
            restore.kept = restore.here.pop(restore.mark.key, None)
            self._shrink(restore, restore.mark.full)
        for checkpoint in restore.here.values():
            self._checkpoints.unpin(checkpoint)
        restore.here.clear()

    def _kept(self, mark: Mark) -> Checkpoint | None:
        """The checkpoint there, where the device has its state and its tail."""
        checkpoint = self._checkpoints.named(mark.key)
        if checkpoint is None or (mark.tail and self._checkpoints.tail(checkpoint) < 0):
            return None
        return checkpoint

    def _shrink(self, restore: _Restore, blocks: int) -> None:
        """Only the first so many blocks are wanted."""
        self._pool.release(page for page in restore.pages[blocks:] if page != _HOLE)
        del restore.pages[blocks:]
        restore.wanted = [depth for depth in restore.wanted if depth < blocks]

    def leased(self, message: KvLeased) -> None:
        restore = self._answered(message.tag)
        restore.lease = message.lease
        extents = message.extents
        if not restore.abandoned:
            self._choose(restore, message.goal)
        if restore.abandoned or message.arena is None or (restore.marks and restore.mark is None):
            self._end(restore)
            return
        if restore.mark is not None:
            if restore.mark.key in self._followers:
                self._follow(restore, restore.mark.key)
                return
            self._followers[restore.mark.key] = []
        state = restore.mark is not None and restore.kept is None
        if len(extents) < len(restore.wanted) + state and (restore.marks or not extents):
            self._end(restore)
            return
        blocks = len(extents) - state
        if blocks < len(restore.wanted):
            self._shrink(restore, restore.wanted[blocks])
        loads: dict[int, tuple[Extent, ...]] = {}
        for index, depth in enumerate(restore.wanted):
            page = self._pool.find(restore.chain.block(depth).name)
            if page is None:
                loads[depth] = extents[index]
                if index in message.from_disk:
                    restore.from_disk.add(depth)
            else:  # others have computed or restored it meanwhile
                self._pool.acquire((page,))
                restore.pages[depth] = page
        restore.wanted = list(loads)
        tails = int(state and restore.mark is not None and bool(restore.mark.tail))
        if len(loads) + tails > self._pool.available or not (not state or self._take_slot(restore)):
            self._end(restore, again=True)
            return
        pages = self._pool.allocate(len(loads), restore.owner.session)
        for depth, page in zip(loads, pages, strict=True):
            restore.pages[depth] = page
        self._ready += [_Load(restore, depth, message.arena, where) for depth, where in loads.items()]
        restore.under_way = len(loads)
        if state:
            restore.tail = self._pool.allocate(1, restore.owner.session)[0] if tails else -1
            self._ready.append(_Load(restore, _STATE, message.arena, extents[-1]))
            restore.under_way += 1
        if not restore.under_way:
            self._end(restore)

    def _follow(self, restore: _Restore, key: Key) -> None:
        """Another restore loads this checkpoint: wait for its end."""
        if restore.lease:
            self._kv.release(restore.lease)
            restore.lease = 0
        if restore.kept is not None:
            self._checkpoints.unpin(restore.kept)
        restore.mark = restore.kept = None
        self._followers[key].append(restore)

    def _answered(self, tag: int) -> _Restore:
        restore = self._asked.pop(tag, None)
        if restore is None:
            raise ValueError(f"a reply to find or lease {tag}, which was not asked or is answered already")
        return restore

    def _take_slot(self, restore: _Restore) -> bool:
        """Get what a state is loaded to."""
        slot = self._checkpoints.take(restore.owner.session)
        restore.slot = -1 if slot is None else slot
        return slot is not None

    def abandon(self, request_id: str) -> None:
        """The request is gone. Loads that were not started are not started any more."""
        restore = self._of.pop(request_id)
        restore.abandoned = True
        for restored in self._ended:
            if restored.request_id == request_id:
                self._ended.remove(restored)
                self._pool.release(restored.pages)
                if restored.checkpoint is not None:
                    self._checkpoints.unpin(restored.checkpoint)
                return
        if restore.under_way == 0:  # not answered yet, or waiting for another one's end
            self._shrink(restore, 0)
            self._choose(restore, -1)
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
            restore = load.restore
            page, state = (restore.tail, restore.slot) if load.index == _STATE else (restore.pages[load.index], -1)
            return Transfer(transfer_id, "load", page, load.arena, load.extents, state)
        return None

    def complete(self, done: set[int], failed: set[int]) -> None:
        """Transfers ended; ids that are not ours are passed over."""
        for transfer_id in sorted(done | failed):
            load = self._loading.pop(transfer_id, None)
            if load is None:
                continue
            if transfer_id in done and load.arena is self._kv.arena:  # else the lease may have ended before the copy
                self.loaded += load.index != _STATE
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

    def _end(self, restore: _Restore, again: bool = False) -> None:
        if restore.lease:
            self._kv.release(restore.lease)
        self._first_names.discard(restore.asked)
        lost = [
            depth for depth in range(len(restore.pages)) if restore.pages[depth] == _HOLE or depth in restore.missing
        ]
        whole = min(lost, default=len(restore.pages))
        loaded = [depth for depth in restore.wanted if depth < whole]
        for depth in loaded:
            block = restore.chain.block(depth)
            restore.pages[depth], _ = self._cache.insert(block, restore.pages[depth], restore.owner)
            self._pool.kept_elsewhere(block.name)
        pages = restore.pages[:whole]
        self._shrink(restore, whole)
        checkpoint = self._publish(restore)
        if restore.kept is not None and (restore.abandoned or again):
            self._checkpoints.unpin(restore.kept)
            restore.kept = None
        if restore.abandoned:
            self._pool.release(pages)
        else:
            if checkpoint is not None:
                self._checkpoints.pin(checkpoint)
            disk = sum(depth < whole for depth in restore.from_disk)
            going_on = checkpoint or restore.kept
            self._ended.append(Restored(restore.request_id, pages, len(loaded), disk, going_on, again))
        if restore.mark is not None:
            for follower in self._followers.pop(restore.mark.key):
                self._end(follower, again=checkpoint is None and restore.kept is None)

    def _publish(self, restore: _Restore) -> Checkpoint | None:
        """Make a checkpoint of what was loaded, if all of it was."""
        if restore.slot < 0 or restore.mark is None:
            return None
        checkpoint = None
        if restore.missing:
            self._checkpoints.give_back(restore.slot)
        else:
            self._checkpoints.publish(restore.mark, restore.slot, restore.tail, owner=restore.owner)
            self._pool.kept_elsewhere(restore.mark.key)
            checkpoint = self._checkpoints.named(restore.mark.key)
            assert checkpoint is not None  # ours, or one that came from elsewhere meanwhile
            checkpoint.stored = True
            self.loaded_checkpoints += 1
        if restore.tail >= 0:
            self._pool.release((restore.tail,))
        restore.slot = restore.tail = -1
        return checkpoint
