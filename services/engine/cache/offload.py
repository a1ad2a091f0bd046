"""The scheduler's side of the kvstore: one door to restores and write-through."""

from collections.abc import Sequence
from itertools import count

from services.engine.batch import ModelOutput, Transfer
from services.engine.cache.block_pool import BlockPool
from services.engine.cache.checkpoints import Checkpoint, Checkpoints, Mark
from services.engine.cache.content import Block
from services.engine.cache.kv_client import KvClient
from services.engine.cache.owners import Owner
from services.engine.cache.prefix_cache import BlockChain, PrefixCache
from services.engine.cache.recompute_cost import RecomputeCost
from services.engine.cache.restore import Restored, Restores
from services.engine.cache.write_through import WriteThrough
from services.engine.mailbox import KvAnswer, KvConnected, KvLeased, KvReserved

COPIES_UNDER_WAY = 256
"""Each way. More than about 1,000 queued copies make cudaMemcpyAsync block the host (vllm#29013)."""
STORES_A_DECODE = 16
"""Stores that begin with a step that only decodes: each takes the host some 5 us, and the 27B's step 6 ms."""
STATE_COPIES_UNDER_WAY = 8
"""States written through at once at most: a state is as large as many blocks, and its slot is kept meanwhile."""


class Offload:
    """Decides which blocks and checkpoints move; the runner moves them. Never waits: what it needs comes as messages
    and outputs."""

    def __init__(
        self,
        pool: BlockPool,
        cache: PrefixCache,
        checkpoints: Checkpoints,
        kv: KvClient,
        cost: RecomputeCost,
        page_bytes: int,
        state_bytes: int,
    ) -> None:
        self._kv = kv
        self._checkpoints = checkpoints
        tags, transfer_ids = count(1), count(1)
        self._restores = Restores(pool, cache, checkpoints, kv, tags, transfer_ids, COPIES_UNDER_WAY)
        # Stores hold pages and slots, so of few they must leave some to those that run.
        blocks = max(1, min(COPIES_UNDER_WAY, pool.size // 2))
        states = max(1, min(STATE_COPIES_UNDER_WAY, checkpoints.size // 4))
        self._stores = WriteThrough(
            pool, checkpoints, kv, cost, tags, transfer_ids, page_bytes, state_bytes, blocks, states
        )

    @property
    def under_way(self) -> int:
        """Transfers that the runner has not reported yet."""
        return self._restores.loading + self._stores.copying

    @property
    def idle(self) -> bool:
        return self._restores.idle and self._stores.idle

    @property
    def loaded(self) -> int:
        """Blocks restored since the start."""
        return self._restores.loaded

    @property
    def stored(self) -> int:
        """Blocks written through since the start."""
        return self._stores.stored

    @property
    def loaded_checkpoints(self) -> int:
        """Checkpoints restored since the start."""
        return self._restores.loaded_checkpoints

    @property
    def stored_checkpoints(self) -> int:
        """Checkpoints written through since the start."""
        return self._stores.stored_checkpoints

    @property
    def connected(self) -> bool:
        return self._kv.arena is not None

    def being_restored(self, block: Block) -> bool:
        return self._restores.under_way(block)

    def held(self, request_id: str) -> int:
        """Pages that a request's restore holds."""
        return self._restores.held(request_id)

    def restore(
        self,
        request_id: str,
        chain: BlockChain,
        pages: list[int],
        owner: Owner,
        trace: str = "",
        marks: Sequence[Mark] = (),
    ) -> None:
        """Look for the chain's full blocks behind `pages` (of which there is at least one); with `marks` for a
        checkpoint at one of these. The hold of `pages` passes over until `take_restored` gives it back. `owner`: the
        session of the request."""
        self._restores.ask(request_id, chain, pages, owner, trace, marks)

    def weigh(self, owner: Owner) -> None:
        """The standing of a session has changed."""
        if self._kv.arena is not None and owner.tips:
            self._kv.weigh(tuple(owner.tips), owner.chance)

    def abandon(self, request_id: str) -> None:
        """A request that is being restored is gone."""
        self._restores.abandon(request_id)

    def take_restored(self) -> list[Restored]:
        return self._restores.take_restored()

    def offer(self, what: Block | Checkpoint) -> None:
        """The bytes of a block or a checkpoint are complete on the device: keep a copy."""
        self._stores.offer(what)

    def receive(self, message: KvAnswer) -> None:
        match message:
            case KvLeased():
                self._restores.leased(message)
            case KvReserved():
                self._stores.reserved(message)
            case KvConnected():
                self._checkpoints.forget_store()
                self._stores.connected()

    def transfers(self, decoding: bool = False) -> tuple[Transfer, ...]:
        """Copies to start with the next batch, and a call to the store for room for those of a later one. `decoding`:
        the batch only decodes, so that what it takes to start copies is felt."""
        started: list[Transfer] = []
        while (transfer := self._restores.transfer()) is not None:
            started.append(transfer)
        stores = STORES_A_DECODE if decoding else COPIES_UNDER_WAY
        while stores and (transfer := self._stores.transfer()) is not None:
            started.append(transfer)
            stores -= 1
        self._stores.ask()
        return tuple(started)

    def complete(self, output: ModelOutput) -> None:
        done, failed = set(output.transfers_done), set(output.transfers_failed)
        if done or failed:
            self._restores.complete(done, failed)
            self._stores.complete(done, failed)
