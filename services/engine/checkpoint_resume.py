"""How a request of a recurrent model goes on: from a checkpoint. And where new ones come from."""

from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from services.engine.batch import Copy, Row
from services.engine.cache.block_pool import BlockPool
from services.engine.cache.checkpoints import Checkpoint, Checkpoints, Mark
from services.engine.cache.offload import Offload
from services.engine.cache.prefix_cache import PrefixCache
from services.engine.checkpoint_plan import checkpoint_positions
from services.engine.scheduler_config import SchedulerConfig
from services.engine.sequence import Sequence
from services.protocol.hashing import BLOCK_TOKENS
from services.protocol.kv import Key

MOST_PROBES = 512
"""Positions at most for which the kvstore is asked about one request."""
BEHIND_ANSWER = 2
"""A message that was generated here ends with a token that was sampled and not run, and perhaps with a line break of
the template: its checkpoint lies so many tokens before the next prompt's hint at most."""


@dataclass(frozen=True, slots=True)
class _Taken:
    sequence: Sequence
    mark: Mark
    slot: int
    page: int
    """For the tail; -1: there is none."""


class CheckpointResume:
    """A Resume for models whose state can only be resumed where it was kept.

    A request that runs owns one slot, whose state stands exactly at `Sequence.computed`. It goes on from the deepest
    checkpoint of its exact prefix: `before` the step the state is copied to its slot and the tail to a page of its own,
    so that any number may go on from one checkpoint. Where no slot or page is left for a copy, it takes the checkpoint
    itself over. New checkpoints are copies `after` the step that reached their position, and can be found once that
    step's output is there; a request that ends or is preempted leaves its own slot and page as a checkpoint, without
    any copy.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        cache: PrefixCache,
        checkpoints: Checkpoints,
        offload: Offload,
    ) -> None:
        self._config = config
        self._pool = pool
        self._cache = cache
        self._checkpoints = checkpoints
        self._offload = offload
        self._sources: dict[Sequence, Checkpoint] = {}
        """What is to be copied to whom before the next step; pinned until its output is there."""
        self._taken: list[_Taken] = []

    # Resuming.

    def room(self, promised: int) -> bool:
        return self._checkpoints.available > promised

    def sought(self, sequence: Sequence, blocks: int) -> list[Mark] | None:
        """Names of the checkpoints that the kvstore may have behind the deepest one here, the deepest first."""
        chain, end = sequence.chain, len(sequence.tokens)
        here = self._checkpoints.find(chain)
        above = here.mark.position if here is not None else 0
        known = {mark.position: mark for mark in self._checkpoints.known(chain, above)}
        positions = {end, len(sequence.request.prompt), *known}
        for hint in sequence.request.hints:
            positions.update(range(hint - BEHIND_ANSWER, hint + 1))
        positions.update(range(self._config.checkpoint_interval, end + 1, self._config.checkpoint_interval))
        least = max(above + 1, self._config.checkpoint_gap)
        chosen = sorted((position for position in positions if least <= position <= end), reverse=True)
        return [known.get(position) or Mark.of(chain, position) for position in chosen[:MOST_PROBES]] or None

    def begin(self, sequence: Sequence, pages: list[int], host: int, restored: Checkpoint | None) -> bool:
        if restored is not None:
            self._checkpoints.unpin(restored, used=False)
        checkpoint = self._checkpoints.find(sequence.chain)
        # Not just of `pages`: others may have computed more since these were found.
        blocks = self._cache.match(sequence.chain)[: checkpoint.mark.full] if checkpoint is not None else []
        self._pool.acquire(blocks)
        self._pool.release(pages, used=False)
        if checkpoint is None:
            slot = self._checkpoints.take()
            if slot is None:
                return False
            sequence.state = slot
            self._moved(sequence, [])
            return True
        if not self._branch(sequence, checkpoint, blocks):
            self._pool.release(blocks, used=False)
            return False
        # A restored checkpoint brought its partial block too; it may well have needed no other.
        mark, here = checkpoint.mark, (len(pages) - host) * BLOCK_TOKENS
        reach = mark.position if checkpoint is restored else min(mark.full, len(pages)) * BLOCK_TOKENS
        self._moved(sequence, [checkpoint.base, mark.position], max(0, reach - here))
        return True

    def _branch(self, sequence: Sequence, checkpoint: Checkpoint, blocks: list[int]) -> bool:
        """Give a request a slot and the pages of a checkpoint, the full ones of which are `blocks`."""
        tail = bool(checkpoint.mark.tail)
        self._checkpoints.pin(checkpoint)
        slot = self._checkpoints.take() if self._pool.available or not tail else None
        if slot is not None:
            self._sources[sequence] = checkpoint
            sequence.state, sequence.pages = slot, blocks + self._pool.allocate(int(tail))
            return True
        self._checkpoints.unpin(checkpoint, used=False)
        if checkpoint.pins:
            return False
        sequence.state, page = self._checkpoints.take_over(checkpoint)
        sequence.pages = [*blocks, page] if tail else blocks
        return True

    def catch_up(self, sequence: Sequence) -> None:
        if sequence in self._sources:  # and its slot has no state yet
            return
        checkpoint = self._checkpoints.find(sequence.chain, sequence.computed)
        if checkpoint is None:
            return
        mark, kept = checkpoint.mark, sequence.computed // BLOCK_TOKENS
        blocks = self._cache.match(sequence.chain, kept)[: mark.full - kept]
        self._pool.acquire(blocks)
        self._checkpoints.pin(checkpoint)
        if mark.tail and not self._pool.available:
            self._checkpoints.unpin(checkpoint, used=False)
            self._pool.release(blocks, used=False)
            return
        self._sources[sequence] = checkpoint
        blocks += self._pool.allocate(int(bool(mark.tail)))
        self._pool.release(sequence.pages[kept:])
        sequence.pages[kept:] = blocks
        self._moved(sequence, [checkpoint.base, mark.position])

    def _moved(self, sequence: Sequence, saved: list[int], host: int = 0) -> None:
        """The request goes on from the last of the checkpoints at `saved`, or from its beginning. For the last `host`
        tokens of that prefix the kvstore was needed."""
        request, config = sequence.request, self._config
        position = saved[-1] if saved else 0
        sequence.saved = saved
        sequence.computed = position
        sequence.committed = position // BLOCK_TOKENS
        sequence.found(position - host, host)
        sequence.stops = checkpoint_positions(
            request.hints,
            len(request.prompt),
            len(sequence.tokens),
            position,
            config.checkpoint_interval,
            config.checkpoint_gap,
        )

    # Taking.

    def next_stop(self, sequence: Sequence) -> int | None:
        index = bisect_right(sequence.stops, sequence.computed)
        return sequence.stops[index] if index < len(sequence.stops) else None

    def stop_key(self, sequence: Sequence) -> Key | None:
        stop = self.next_stop(sequence)
        return None if stop is None else Mark.of(sequence.chain, stop).key

    def copies(self, batch: Iterable[tuple[Sequence, Row]]) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
        before: list[Copy] = []
        for sequence, checkpoint in self._sources.items():
            before.append(Copy("state", checkpoint.slot, sequence.state))
            if checkpoint.mark.tail:
                before.append(Copy("page", self._checkpoints.tail(checkpoint), sequence.pages[checkpoint.mark.full]))
        after: list[Copy] = []
        for sequence, row in batch:
            end = row.start + len(row.tokens)
            if (row.tokens and end in sequence.stops) or (sequence.prefilled and self._rung_between(row.start, end)):
                after += self._take(sequence, end)
        return tuple(before), tuple(after)

    def _rung_between(self, start: int, end: int) -> bool:
        """Whether a decode has come to the next multiple of the interval: a long answer has a ladder too."""
        interval = self._config.checkpoint_interval
        return start // interval < end // interval

    def _take(self, sequence: Sequence, position: int) -> list[Copy]:
        """Prepare a checkpoint behind the step's row; nothing where it is there already or there is no room for it."""
        mark = Mark.of(sequence.chain, position)
        there = self._checkpoints.named(mark.key)
        if there is not None and self._checkpoints.usable(there):
            return []
        if mark.tail and not self._pool.available:
            return []
        slot = self._checkpoints.take()
        if slot is None:
            return []
        page = self._pool.allocate(1)[0] if mark.tail else -1
        self._taken.append(_Taken(sequence, mark, slot, page))
        copies = [Copy("state", sequence.state, slot)]
        if page >= 0:
            copies.append(Copy("page", sequence.pages[mark.full], page))
        return copies

    def stepped(self, failed: Collection[Sequence]) -> None:
        for checkpoint in self._sources.values():
            self._checkpoints.unpin(checkpoint)
        self._sources.clear()
        taken, self._taken = self._taken, []
        for item in taken:
            if item.sequence in failed:
                self._checkpoints.give_back(item.slot)
            else:
                self._publish(item.sequence, item.mark, item.slot, item.page)
            if item.page >= 0:
                self._pool.release((item.page,))

    def leave(self, sequence: Sequence, keep: bool) -> None:
        """With `keep` its state becomes a checkpoint, and its partial page the tail. The hold of all pages stays the
        caller's."""
        source = self._sources.pop(sequence, None)
        if source is not None:  # its slot has no state yet, and the source is there anyway
            self._checkpoints.unpin(source, used=False)
            keep = False
        slot, sequence.state = sequence.state, -1
        if not keep or sequence.computed < self._config.checkpoint_gap:
            self._checkpoints.give_back(slot)
            return
        mark = Mark.of(sequence.chain, sequence.computed)
        self._publish(sequence, mark, slot, sequence.pages[mark.full] if mark.tail else -1)

    def _publish(self, sequence: Sequence, mark: Mark, slot: int, page: int) -> None:
        request = sequence.request
        base = max((position for position in sequence.saved if position < mark.position), default=0)
        root = bool(request.hints) and mark.position == request.hints[0]
        checkpoint = self._checkpoints.publish(mark, slot, page, base=base, root=root)
        sequence.saved.append(mark.position)
        if mark.position % self._config.checkpoint_interval or mark.position in (len(request.prompt), *request.hints):
            sequence.kept.add(mark.key)  # else it is a rung of the ladder, which serves this request alone
        self._checkpoints.supersede(sequence.chain, mark.position, sequence.kept)
        if checkpoint is not None and mark.position >= self._config.checkpoint_gap:  # `sought` asks for no other
            self._offload.offer(checkpoint)

    def device_lost(self) -> None:
        for checkpoint in self._sources.values():
            self._checkpoints.unpin(checkpoint, used=False)
        self._sources.clear()
        for item in self._taken:
            self._checkpoints.give_back(item.slot)
            self._pool.release([item.page] if item.page >= 0 else [])
        self._taken.clear()
