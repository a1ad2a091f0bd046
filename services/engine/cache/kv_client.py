"""What the scheduler needs of the kvstore's client."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from services.engine.cache.arena import Arena
from services.protocol.kv import Entry, Key


class Goal(NamedTuple):
    """What a find may lease."""

    keys: int
    """So many of the keys, from the first on."""
    key: Key
    """And this one; empty: nothing else."""


class KvClient(Protocol):
    """No call blocks. Each `lease` and `find` is answered by exactly one KvLeased, each `reserve` by one KvReserved of
    the same tag in the core's inbox, an empty one where the store is away or dies.

    What an arena's connection gave is void once `arena` is another: no copy from or to it may begin, bytes that were
    read from it may be another object's, and its reservations may be neither committed nor dropped.
    """

    @property
    def arena(self) -> Arena | None:
        """Of the present connection; None while the store is away."""
        ...

    def lease(self, tag: int, keys: Sequence[Key], trace: str = "") -> None: ...

    def find(self, tag: int, keys: Sequence[Key], goals: Sequence[Goal], trace: str = "") -> None:
        """Lease the first of these goals that can be had whole: in the answer, the extents of its `keys` and, behind
        them, of its `key`. One call, since an answer is heard between two steps only."""
        ...

    def reserve(self, tag: int, entries: Sequence[Entry], trace: str = "") -> None: ...

    def commit(self, keys: Sequence[Key]) -> None: ...

    def release(self, lease: int) -> None: ...

    def drop(self, keys: Sequence[Key]) -> None: ...

    def weigh(self, keys: Sequence[Key], chance: float) -> None:
        """See `services.protocol.kv.Weigh`. Nothing comes back."""
        ...


class NoKvStore:
    """The client of an engine that runs without kvstore: away for ever, so that nothing is asked of it."""

    arena: Arena | None = None

    def lease(self, tag: int, keys: Sequence[Key], trace: str = "") -> None:
        raise RuntimeError("there is no kvstore to lease from")

    def find(self, tag: int, keys: Sequence[Key], goals: Sequence[Goal], trace: str = "") -> None:
        raise RuntimeError("there is no kvstore to look into")

    def reserve(self, tag: int, entries: Sequence[Entry], trace: str = "") -> None:
        raise RuntimeError("there is no kvstore to write to")

    def commit(self, keys: Sequence[Key]) -> None:
        """Nothing was reserved."""

    def release(self, lease: int) -> None:
        """Nothing was leased."""

    def drop(self, keys: Sequence[Key]) -> None:
        """Nothing was reserved."""

    def weigh(self, keys: Sequence[Key], chance: float) -> None:
        """Nothing is kept."""
