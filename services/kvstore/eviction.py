"""The order in which objects would be evicted."""

from heapq import heapify, heappop, heappush
from itertools import count

from services.kvstore.stored import Stored


class VictimQueue:
    """Objects by score, the least first.

    A heap that is brought up to date lazily. A score that rose leaves its entry too low: it is put where it belongs
    when it comes up. A score that fell needs a new entry, by `fell`; the old one is stale and passed over.

    It holds each object at most once and may hold some that are no victims (any more): what `pop` returns is for the
    caller to judge, and to push again when it becomes a victim.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Stored]] = []
        self._entries: dict[Stored, tuple[float, int]] = {}
        """The entry that counts of each object: its score then, and its number. All others are stale."""
        self._order = count()

    def __len__(self) -> int:
        """Entries, stale ones included."""
        return len(self._heap)

    def push(self, stored: Stored) -> None:
        """Idempotent."""
        if stored not in self._entries:
            self._enter(stored)

    def fell(self, stored: Stored) -> None:
        """Tell that an object's score may be less than it was. Passes over one that is not in the queue."""
        entry = self._entries.get(stored)
        if entry is not None and stored.score < entry[0]:
            self._enter(stored)

    def forget(self, stored: Stored) -> None:
        """Take an object out."""
        if self._entries.pop(stored, None) is not None:
            self._sweep()

    def pop(self, below: float) -> Stored | None:
        """Take out the object of the least score, if that is less than `below`."""
        while self._heap:
            score, number, stored = self._heap[0]
            current = self._entries.get(stored) == (score, number)
            if current and score >= below:
                return None
            heappop(self._heap)
            if not current:
                continue
            if stored.score > score:
                self._enter(stored)
            else:
                del self._entries[stored]
                return stored
        return None

    def _enter(self, stored: Stored) -> None:
        entry = (stored.score, next(self._order))
        self._entries[stored] = entry
        heappush(self._heap, (*entry, stored))
        self._sweep()

    def _sweep(self) -> None:
        """Let stale entries go once they are the greater part."""
        if len(self._heap) > 64 + 2 * len(self._entries):
            self._heap = [(*entry, stored) for stored, entry in self._entries.items()]
            heapify(self._heap)
