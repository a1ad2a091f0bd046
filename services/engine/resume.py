"""How a request goes on from what is on the device of its prefix. Here: for models without recurrent state."""

from collections.abc import Collection, Iterable
from typing import Protocol

from services.engine.batch import Copy, Row
from services.engine.cache.block_pool import BlockPool
from services.engine.cache.checkpoints import Checkpoint, Mark
from services.engine.cache.prefix_cache import PrefixCache
from services.engine.sequence import Sequence
from services.protocol.hashing import BLOCK_TOKENS


class Resume(Protocol):
    """What the scheduler must know of the kind of model. Owned by it, on the core's thread."""

    def room(self, promised: int) -> bool:
        """Whether one more request may be admitted beside `promised` ones that have not begun."""
        ...

    def sought(self, sequence: Sequence, blocks: int) -> list[Mark] | None:
        """What of a request to look for in the kvstore, when its first `blocks` are on the device: checkpoints at these
        marks, or (an empty list) its further blocks. None: nothing. Where it is something, what the device has is kept
        for the request until `begin` or `let_go`."""
        ...

    def let_go(self, sequence: Sequence) -> None:
        """Nothing need be kept for the request any more."""
        ...

    def begin(
        self, sequence: Sequence, pages: list[int], host: int, restored: Checkpoint | None, disk: int = 0
    ) -> bool:
        """Let an admitted request go on from what is on the device.

        `pages` hold its first blocks, the last `host` of which came from the kvstore for it (`disk` of them from its
        disk); their hold passes over, and so does one pin of `restored`. False: there is no room just now, and the
        request has nothing.
        """
        ...

    def catch_up(self, sequence: Sequence) -> None:
        """Skip what another request computed since this one was admitted: of forty agents that arrive at once with one
        system prompt, one reads it."""
        ...

    def next_stop(self, sequence: Sequence) -> int | None:
        """Where the next chunk of its prefill must end at the latest."""
        ...

    def meet(self, prefills: list[Sequence]) -> None:
        """These prefill side by side, the oldest first: where a newcomer shares more with an older one than what is
        there yet, see to it that it can go on from where they part."""
        ...

    def awaited(self, sequence: Sequence) -> bytes | None:
        """The name of the block or the checkpoint that a prefill makes next for others to go on from."""
        ...

    def copies(self, batch: Iterable[tuple[Sequence, Row]]) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
        """What is to be done (before, after) the rows of the next step. Once a step."""
        ...

    def stepped(self, failed: Collection[Sequence]) -> None:
        """The step is done, and the full blocks of its rows are named. What `failed` requests computed is not kept."""
        ...

    def leave(self, sequence: Sequence, keep: bool, cut: bool = False) -> None:
        """A running request gives up what it has besides its pages. `keep`: for others to go on from; `cut`: its client
        hung up, and may come back with a part of what was said."""
        ...

    def device_lost(self) -> None:
        """No step will be done any more."""
        ...


class BlockResume:
    """Goes on behind the last full block that is there, whichever that is."""

    def __init__(self, pool: BlockPool, cache: PrefixCache) -> None:
        self._pool = pool
        self._cache = cache

    def room(self, promised: int) -> bool:
        return True

    def sought(self, sequence: Sequence, blocks: int) -> list[Mark] | None:
        return [] if blocks < sequence.chain.full else None

    def let_go(self, sequence: Sequence) -> None:
        """The pages are all that it needs, and the restore holds them."""

    def begin(
        self, sequence: Sequence, pages: list[int], host: int, restored: Checkpoint | None, disk: int = 0
    ) -> bool:
        self._extend(sequence, pages, host * BLOCK_TOKENS, disk * BLOCK_TOKENS)
        return True

    def catch_up(self, sequence: Sequence) -> None:
        if sequence.computed != len(sequence.pages) * BLOCK_TOKENS:
            return
        if pages := self._cache.match(sequence.chain, len(sequence.pages)):
            self._pool.acquire(pages)
            self._extend(sequence, pages, 0)

    def _extend(self, sequence: Sequence, pages: list[int], host: int, disk: int = 0) -> None:
        """Add pages to the prefix, the last `host` tokens of which came from the kvstore."""
        sequence.pages += pages
        sequence.committed = len(sequence.pages)
        sequence.computed = sequence.committed * BLOCK_TOKENS
        sequence.found(sequence.computed - host, host, disk)

    def next_stop(self, sequence: Sequence) -> int | None:
        return None

    def meet(self, prefills: list[Sequence]) -> None:
        """Every block can be gone on from."""

    def awaited(self, sequence: Sequence) -> bytes | None:
        depth, inside = divmod(sequence.computed, BLOCK_TOKENS)
        return None if inside or depth >= sequence.chain.full else sequence.chain.block(depth).name

    def copies(self, batch: Iterable[tuple[Sequence, Row]]) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
        return (), ()

    def stepped(self, failed: Collection[Sequence]) -> None:
        """Nothing was copied."""

    def leave(self, sequence: Sequence, keep: bool, cut: bool = False) -> None:
        """Its blocks are named and stay."""

    def device_lost(self) -> None:
        """Nothing was planned."""
