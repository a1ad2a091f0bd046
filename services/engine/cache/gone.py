"""What was on the device and is no more: remembered by name, to tell a request why it must compute."""

import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from services.protocol.generate import MissReason

REMEMBERED = 2**15
"""Names; about 10 MB. At 64 tokens a block that is 2 million tokens of contexts that were given up."""


class Departure(NamedTuple):
    when: float
    """Unix seconds."""
    taker: str
    """The session whose need of room it was given up for; empty where nobody's was."""
    stored: bool
    """The kvstore had it then."""
    refused: bool
    """The kvstore had been asked to keep it, and had no room."""
    parent: bytes
    """Name of the block before it."""
    depth: int
    """Index of the block in its chain; of a checkpoint, the number of full blocks before it."""
    session: str
    """That used it last."""
    store: int
    """Which store that was, counted by connections."""

    def reason(self, connected: bool) -> MissReason:
        """Why it cannot be had, now that the kvstore (`connected`: it is there) did not give it back."""
        if self.stored:
            return "store_lost" if connected else "store_away"
        return "store_full" if self.refused else "evicted"


class Gone:
    """Departures by the name of what left, the oldest forgotten first. On the core's thread."""

    def __init__(self) -> None:
        self._departures: OrderedDict[bytes, Departure] = OrderedDict()
        self._store = 0

    def left(
        self, name: bytes, parent: bytes, depth: int, *, session: str, taker: str, stored: bool, refused: bool = False
    ) -> None:
        self._departures[name] = Departure(time.time(), taker, stored, refused, parent, depth, session, self._store)
        self._departures.move_to_end(name)
        if len(self._departures) > REMEMBERED:
            self._departures.popitem(last=False)

    def find(self, name: bytes) -> Departure | None:
        return self._departures.get(name)

    def stored(self, name: bytes) -> bool:
        """Whether the kvstore has it, perhaps."""
        departure = self._departures.get(name)
        return departure is not None and departure.stored and departure.store == self._store

    def back(self, name: bytes) -> None:
        """It is on the device again."""
        self._departures.pop(name, None)

    def another_store(self) -> None:
        """What the kvstore had is lost."""
        self._store += 1

    def in_store(self) -> Iterator[tuple[bytes, Departure]]:
        """What the kvstore still has, perhaps, the longest gone first."""
        for name, departure in self._departures.items():
            if departure.stored and departure.store == self._store:
                yield name, departure
