"""How a request of a recurrent model goes on: from a checkpoint. And where new ones come from."""

from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from services.engine.batch import Copy, Row
from services.engine.cache.block_pool import BlockPool
from services.engine.cache.checkpoints import Checkpoint, Checkpoints, Mark
from services.engine.cache.offload import Offload
from services.engine.cache.prefix_cache import PrefixCache
from services.engine.checkpoint_plan import ROLL, ROLLING, checkpoint_positions
from services.engine.scheduler_config import SchedulerConfig
from services.engine.sequence import Sequence
from services.protocol.hashing import BLOCK_TOKENS
from services.protocol.kv import Key

MOST_PROBES = 512
"""Positions at most for which the kvstore is asked about one request."""
BEHIND_ANSWER = 2
"""A message that was generated here ends with a token that was sampled and not run, and perhaps with a line break of
the template: its checkpoint lies so many tokens before the next prompt's hint at most."""
SPARE_PAGES = 8
"""Pages that a rolling checkpoint leaves to others."""


@dataclass(frozen=True, slots=True)
class _Taken:
    sequence: Sequence
    mark: Mark
    slot: int
    page: int
    """For the tail; -1: there is none."""
    rolling: bool


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
        if not chosen:
            return None
        if here is not None and not sequence.short:  # else what is kept may be the very room that the restore needs
            self.let_go(sequence)
            self._checkpoints.pin(here)
            sequence.kept_here = here
        return [known.get(position) or Mark.of(chain, position) for position in chosen[:MOST_PROBES]]

    def let_go(self, sequence: Sequence) -> None:
        if sequence.kept_here is not None:
            self._checkpoints.unpin(sequence.kept_here)
            sequence.kept_here = None

    def begin(
        self, sequence: Sequence, pages: list[int], host: int, restored: Checkpoint | None, disk: int = 0
    ) -> bool:
        self.let_go(sequence)
        if restored is not None:
            self._checkpoints.unpin(restored)
        checkpoint = self._checkpoints.find(sequence.chain)
        # Not just of `pages`: others may have computed more since these were found.
        blocks = self._cache.match(sequence.chain)[: checkpoint.mark.full] if checkpoint is not None else []
        self._pool.acquire(blocks)
        self._pool.release(pages)
        if checkpoint is None:
            slot = self._checkpoints.take(sequence.owner.session)
            if slot is None:
                return False
            sequence.state = slot
            self._moved(sequence, None)
            return True
        if not self._branch(sequence, checkpoint, blocks):
            self._pool.release(blocks)
            return False
        # A restored checkpoint brought its partial block too; it may well have needed no other.
        mark, here = checkpoint.mark, (len(pages) - host) * BLOCK_TOKENS
        reach = mark.position if checkpoint is restored else min(mark.full, len(pages)) * BLOCK_TOKENS
        self._moved(sequence, checkpoint, max(0, reach - here), disk * BLOCK_TOKENS)
        return True

    def _branch(self, sequence: Sequence, checkpoint: Checkpoint, blocks: list[int]) -> bool:
        """Give a request a slot and the pages of a checkpoint, the full ones of which are `blocks`."""
        tail = bool(checkpoint.mark.tail)
        self._checkpoints.pin(checkpoint)
        session = sequence.owner.session
        slot = self._checkpoints.take(session) if self._pool.available or not tail else None
        if slot is not None:
            self._sources[sequence] = checkpoint
            sequence.state, sequence.pages = slot, blocks + self._pool.allocate(int(tail), session)
            return True
        self._checkpoints.unpin(checkpoint)
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
            self._checkpoints.unpin(checkpoint)
            self._pool.release(blocks)
            return
        self._sources[sequence] = checkpoint
        blocks += self._pool.allocate(int(bool(mark.tail)), sequence.owner.session)
        self._pool.release(sequence.pages[kept:])
        sequence.pages[kept:] = blocks
        self._moved(sequence, checkpoint)

    def _moved(self, sequence: Sequence, behind: Checkpoint | None, host: int = 0, disk: int = 0) -> None:
        """The request goes on from a checkpoint, or from its beginning. For the last `host` tokens of that prefix the
        kvstore was needed, and its disk for `disk` of these."""
        request, config = sequence.request, self._config
        position = 0 if behind is None else behind.mark.position
        sequence.behind = behind
        sequence.computed = position
        sequence.committed = position // BLOCK_TOKENS
        sequence.found(position - host, host, disk)
        stops = checkpoint_positions(
            request.hints,
            len(request.prompt),
            len(sequence.tokens),
            position,
            config.checkpoint_interval,
            config.checkpoint_gap,
        )
        partings = (parting for parting in sequence.partings if parting > position)
        sequence.stops = tuple(sorted({*stops, *partings}))

    # Taking.

    def next_stop(self, sequence: Sequence) -> int | None:
        index = bisect_right(sequence.stops, sequence.computed)
        return sequence.stops[index] if index < len(sequence.stops) else None

    def meet(self, prefills: list[Sequence]) -> None:
        for index, younger in enumerate(prefills):
            if younger.met:
                continue
            younger.met = True
            for older in prefills[:index]:
                self._meet(older, younger)

    def _meet(self, older: Sequence, younger: Sequence) -> None:
        """Let both take a checkpoint at the last block's border that they share, unless one is due near there."""
        common = older.chain.common(younger.chain)
        position = common // BLOCK_TOKENS * BLOCK_TOKENS
        gap = self._config.checkpoint_gap
        if position < max(older.computed, younger.computed) + gap:
            return
        if any(position - gap < stop <= common for stop in older.stops):
            return
        for sequence in (older, younger):
            sequence.partings.add(position)
            sequence.stops = tuple(sorted({*sequence.stops, position}))

    def awaited(self, sequence: Sequence) -> Key | None:
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
            elif sequence.prefilled and row.start // ROLL < end // ROLL:
                after += self._take(sequence, end, rolling=True)
        return tuple(before), tuple(after)

    def _rung_between(self, start: int, end: int) -> bool:
        """Whether a decode has come to the next multiple of the interval: a long answer has a ladder too."""
        interval = self._config.checkpoint_interval
        return start // interval < end // interval

    def _take(self, sequence: Sequence, position: int, rolling: bool = False) -> list[Copy]:
        """Prepare a checkpoint behind the step's row; nothing where it is there already or there is no room for it;
        where it is a `rolling` one, none that others may want."""
        mark = Mark.of(sequence.chain, position)
        there = self._checkpoints.named(mark.key)
        if there is not None and self._checkpoints.usable(there):
            return []
        if mark.tail and (self._pool.safe <= SPARE_PAGES if rolling else not self._pool.available):
            return []
        session = sequence.owner.session
        slot = self._checkpoints.take_spare() if rolling else self._checkpoints.take(session)
        if slot is None:
            return []
        page = self._pool.allocate(1, session)[0] if mark.tail else -1
        self._taken.append(_Taken(sequence, mark, slot, page, rolling))
        copies = [Copy("state", sequence.state, slot)]
        if page >= 0:
            copies.append(Copy("page", sequence.pages[mark.full], page))
        return copies

    def stepped(self, failed: Collection[Sequence]) -> None:
        for sequence, checkpoint in self._sources.items():
            self._checkpoints.unpin(checkpoint, sequence.owner)
        self._sources.clear()
        taken, self._taken = self._taken, []
        for item in taken:
            if item.sequence in failed:
                self._checkpoints.give_back(item.slot)
            elif item.rolling:
                self._roll(item.sequence, item.mark, item.slot, item.page)
            else:
                self._publish(item.sequence, item.mark, item.slot, item.page)
            if item.page >= 0:
                self._pool.release((item.page,), item.sequence.owner)

    def leave(self, sequence: Sequence, keep: bool, cut: bool = False) -> None:
        """With `keep` its state becomes a checkpoint, and its partial page the tail. The hold of all pages stays the
        caller's."""
        if not cut:
            for checkpoint in sequence.rolling:
                self._checkpoints.discard(checkpoint)
        sequence.rolling.clear()
        source = self._sources.pop(sequence, None)
        if source is not None:  # its slot has no state yet, and the source is there anyway
            self._checkpoints.unpin(source)
            keep = False
        slot, sequence.state = sequence.state, -1
        if not keep or sequence.computed < self._config.checkpoint_gap:
            self._checkpoints.give_back(slot)
            return
        mark = Mark.of(sequence.chain, sequence.computed)
        self._publish(sequence, mark, slot, sequence.pages[mark.full] if mark.tail else -1)

    def _publish(self, sequence: Sequence, mark: Mark, slot: int, page: int) -> None:
        request = sequence.request
        before = sequence.behind
        if before is not None and before.mark.position >= mark.position:
            before = before.before
        root = bool(request.hints) and mark.position == request.hints[0]
        checkpoint = self._checkpoints.publish(mark, slot, page, before=before, root=root, owner=sequence.owner)
        sequence.behind = checkpoint or self._checkpoints.named(mark.key)
        if mark.position % self._config.checkpoint_interval or mark.position in (len(request.prompt), *request.hints):
            sequence.kept.add(mark.key)  # else it is a rung of the ladder, which serves this request alone
        self._checkpoints.supersede(sequence.chain, mark.position, sequence.kept)
        if checkpoint is not None and mark.position >= self._config.checkpoint_gap:  # `sought` asks for no other
            self._offload.offer(checkpoint)

    def _roll(self, sequence: Sequence, mark: Mark, slot: int, page: int) -> None:
        """It is of use only if the request ends just here, and only until its client comes back: worth little, and not
        written through."""
        checkpoint = self._checkpoints.publish(mark, slot, page, before=sequence.behind, owner=sequence.owner)
        if checkpoint is None:
            return
        checkpoint.superseded = True
        sequence.rolling.append(checkpoint)
        if len(sequence.rolling) > ROLLING:
            self._checkpoints.discard(sequence.rolling.pop(0))

    def device_lost(self) -> None:
        for checkpoint in self._sources.values():
            self._checkpoints.unpin(checkpoint)
        self._sources.clear()
        for item in self._taken:
            self._checkpoints.give_back(item.slot)
            self._pool.release([item.page] if item.page >= 0 else [])
        self._taken.clear()
