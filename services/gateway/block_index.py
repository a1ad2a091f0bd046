"""Which cache blocks lie on one engine's device, as far as its events told: a hint for the router, never a promise."""

from collections.abc import Sequence

from services.protocol.events import BlockEvents, BlockSnapshot

EARLY_MAX = 1024
"""Events kept while a snapshot is on its way."""


class BlockIndex:
    """The block names of one incarnation of one engine.

    Events carry ids without gaps. After a gap the index answers from what it has and wants a snapshot; events that
    arrive before the snapshot are kept and applied behind it.
    """

    def __init__(self) -> None:
        self.event_id = 0
        """All events up to here are in."""
        self.wants_snapshot = False
        self._blocks: set[bytes] = set()
        self._early: list[BlockEvents] = []
        self._announced = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def overlap(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt are on the device."""
        for count, name in enumerate(hashes):
            if name not in self._blocks:
                return count
        return len(hashes)

    def apply(self, events: BlockEvents) -> None:
        if events.event_id <= self.event_id:
            return
        if events.event_id > self.event_id + 1:
            if len(self._early) < EARLY_MAX:  # those beyond are a gap again, and then another snapshot
                self._early.append(events)
            self.wants_snapshot = True
            return
        self._take(events)
        self.wants_snapshot = False
        self._take_early()

    def announced(self, event_id: int) -> None:
        """The engine's heartbeat says that it has sent events up to `event_id`.

        One that is ahead is normal, events may come a moment behind; two in a row that are ahead of the same missing
        event mean that it was lost and that no later one has shown it.
        """
        if self._announced > self.event_id:
            self.wants_snapshot = True
        self._announced = event_id

    def restore(self, snapshot: BlockSnapshot) -> None:
        self.wants_snapshot = False
        if snapshot.event_id >= self.event_id:
            self._blocks = set(snapshot.blocks)
            self.event_id = snapshot.event_id
        self._announced = max(self._announced, self.event_id)
        self._take_early()

    def _take(self, events: BlockEvents) -> None:
        self._blocks.difference_update(events.removed)
        self._blocks.update(events.stored)
        self.event_id = events.event_id

    def _take_early(self) -> None:
        self._early.sort(key=lambda events: events.event_id)
        while self._early and self._early[0].event_id <= self.event_id + 1:
            events = self._early.pop(0)
            if events.event_id == self.event_id + 1:
                self._take(events)
        if self._early:
            self.wants_snapshot = True
