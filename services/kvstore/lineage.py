"""Which object goes on from which: the forest of contexts of one tier."""

from collections.abc import Iterator

from services.kvstore.stored import Stored
from services.protocol.kv import Key


class Lineage:
    """Objects by key, and by their parent's key, whether or not the parent is kept: it may come (back) later."""

    def __init__(self) -> None:
        self._objects: dict[Key, Stored] = {}
        self._children: dict[Key, list[Stored]] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[Stored]:
        return iter(self._objects.values())

    def find(self, key: Key) -> Stored | None:
        return self._objects.get(key)

    def spares(self, stored: Stored) -> bool:
        """Whether all that goes on from an object can be reached without it: nothing does, or the tier below has all
        of it."""
        children = self._children.get(stored.key)
        return not children or (stored.saved and all(child.saved for child in children))

    def add(self, stored: Stored) -> None:
        """Keep an object whose `expect` was called."""
        self._objects[stored.key] = stored

    def remove(self, stored: Stored) -> Stored | None:
        """Forget an object. Returns its parent if that is kept."""
        self.discard(stored)
        return self.disown(stored)

    def discard(self, stored: Stored) -> None:
        """Forget an object that is disowned already."""
        del self._objects[stored.key]

    def expect(self, stored: Stored) -> None:
        """Count an object as a child of its parent, so that its parent is no leaf, before it is added itself."""
        if stored.parent:
            self._children.setdefault(stored.parent, []).append(stored)

    def disown(self, stored: Stored) -> Stored | None:
        """The contrary of `expect`; returns what `remove` does."""
        if not stored.parent:
            return None
        siblings = self._children[stored.parent]
        if len(siblings) > 1:
            siblings.remove(stored)
        else:
            del self._children[stored.parent]
        return self._objects.get(stored.parent)

    def parted(self, key: Key) -> bool:
        """Whether two contexts go on from it: two kept blocks. A checkpoint beside a block is of the same context."""
        return sum(not child.is_state for child in self._children.get(key, ())) > 1

    def context(self, key: Key) -> Iterator[Stored]:
        """What lies before (and with) the end of a context and belongs to no other one, from there on backwards: the
        object `key`, then its kept parents, up to where another context parts. Checkpoints along the way included."""
        came: Stored | None = None
        while (stored := self._objects.get(key)) is not None and not stored.shared:
            children = self._children.get(key, ())
            if any(child is not came and not child.is_state for child in children):
                return
            yield stored
            yield from (child for child in children if child is not came)
            came, key = stored, stored.parent

    def unsaved_path(self, stored: Stored) -> list[Stored]:
        """The object and what lies before it, as far as it is committed and not saved, the first of the chain first."""
        path: list[Stored] = []
        at: Stored | None = stored
        while at is not None and at.committed and not at.saved:
            path.append(at)
            at = self._objects.get(at.parent) if at.parent else None
        path.reverse()
        return path
