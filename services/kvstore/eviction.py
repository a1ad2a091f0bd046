"""The order in which objects would be evicted."""

from heapq import heapify, heappop, heappush
from itertools import count

from services.kvstore.stored import Stored


class VictimQueue:
    """Objects by score, the least first. A heap that is brought up to date lazily: a use only raises an object's score,
    so its entry stands too low until it comes up, and is then put where it belongs.

    It holds each object at most once and may hold some that are no victims (any more): what `pop` returns is for the
    caller to judge, and to push again when it becomes a victim.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Stored]] = []
        self._forgotten = 0
        self._order = count()

    def __len__(self) -> int:
        """Entries, those of forgotten objects included."""
        return len(self._heap)

    def push(self, stored: Stored) -> None:
        """Idempotent."""
        if not stored.queued:
            stored.queued = True
            heappush(self._heap, (stored.score, next(self._order), stored))

    def forget(self, stored: Stored) -> None:
        """Tell that an object is no longer kept; once they are the greater part, entries of such objects go."""
        if not stored.queued:
            return
        self._forgotten += 1
        if self._forgotten > 64 and self._forgotten * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].kept]
            heapify(self._heap)
            self._forgotten = 0

    def pop(self, below: float) -> Stored | None:
        """Take out the object of the least score, if that is less than `below`."""
        while self._heap:
            standing, _, stored = self._heap[0]
            if stored.kept and standing >= below:
                return None
            heappop(self._heap)
            if not stored.kept:
                self._forgotten -= 1
            elif stored.score > standing:
                heappush(self._heap, (stored.score, next(self._order), stored))
            else:
                stored.queued = False
                return stored
        return None
