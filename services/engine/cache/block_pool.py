"""Device pages: who holds them, which content they have, and in what order they are given up. Bookkeeping only."""

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from services.protocol.hashing import BlockHash


class Block(NamedTuple):
    """The name of one full block and its place in its chain."""

    name: BlockHash
    parent: BlockHash
    """Name of the block before it; empty for a chain's first block."""
    depth: int
    """Index in its chain: it holds positions [64 * depth, 64 * depth + 64)."""
    tail: bool = False
    """A checkpoint's own copy of the partial block behind its last full one, by the checkpoint's key: found by those
    who know the checkpoint, and told to nobody else."""


class BlockPool:
    """Pages 0..n-1, each in one of three states.

    * free: nobody holds it and its bytes mean nothing;
    * held: its reference count is above 0;
    * cached: nobody holds it, but it has a name; it is taken back when the free pages run out.

    Cached pages go in the order of their last use, and of those used last together the deepest first: whoever holds a
    block holds its parents too, so a chain is given up from its end and no child outlives its parent. Owned by the
    core's thread. All operations are O(1) a page, O(log n) where a cached page is involved.
    """

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"a pool of {pages} pages holds nothing")
        self.size = pages
        self.evictions = 0
        """Cached pages given up since the start."""
        self._free = list(range(pages - 1, -1, -1))
        self._references = [0] * pages
        self._blocks: list[Block | None] = [None] * pages
        self._page_of: dict[BlockHash, int] = {}
        self._clock = 0
        self._last_use = [0] * pages
        self._cached = 0
        # (last use, -depth, page); an entry is void once its page is held again or was used later.
        self._order: list[tuple[int, int, int]] = []
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: free and cached ones."""
        return len(self._free) + self._cached

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, held once each and nameless. Raises ValueError when fewer are available."""
        if count > self.available:
            raise ValueError(f"{count} pages wanted, {self.available} available")
        while len(self._free) < count:
            self._evict()
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def acquire(self, pages: Iterable[int]) -> None:
        """Hold named or held pages once more."""
        for page in pages:
            if self._references[page] == 0:
                if self._blocks[page] is None:
                    raise ValueError(f"page {page} is free")
                self._cached -= 1
            self._references[page] += 1

    def release(self, pages: Iterable[int], used: bool = True) -> None:
        """Give one hold of each page back. `used`: count this as a use of their content (a request's), or not (a
        transfer's). Pages released together count as used at the same time."""
        if used:
            self._clock += 1
        for page in pages:
            references = self._references[page] - 1
            if references < 0:
                raise ValueError(f"page {page} is released more often than held")
            self._references[page] = references
            if used:
                self._last_use[page] = self._clock
            if references == 0:
                self._unhold(page)

    def _unhold(self, page: int) -> None:
        block = self._blocks[page]
        if block is None:
            self._free.append(page)
            return
        self._cached += 1
        if len(self._order) > 4 * self.size:  # mostly void entries
            self._order = [entry for entry in self._order if self._valid(entry)]
            heapq.heapify(self._order)
        heapq.heappush(self._order, (self._last_use[page], -block.depth, page))

    def _valid(self, entry: tuple[int, int, int]) -> bool:
        last_use, _, page = entry
        return self._references[page] == 0 and self._blocks[page] is not None and self._last_use[page] == last_use

    def _evict(self) -> None:
        while True:
            entry = heapq.heappop(self._order)
            if self._valid(entry):
                break
        page = entry[2]
        block = self._blocks[page]
        assert block is not None  # _valid has seen it
        self._blocks[page] = None
        del self._page_of[block.name]
        self._cached -= 1
        self.evictions += 1
        self._free.append(page)
        if block.tail:
            return
        if block.name in self._stored:
            del self._stored[block.name]
        else:
            self._removed[block.name] = None

    def find(self, name: BlockHash) -> int | None:
        """The page that has this content, held or cached."""
        return self._page_of.get(name)

    def held(self, page: int) -> bool:
        return self._references[page] > 0

    def name(self, page: int, block: Block) -> bool:
        """Say what a held page contains. False, and nothing is changed, when another page has that name already."""
        if self._references[page] == 0 or self._blocks[page] is not None:
            raise ValueError(f"page {page} cannot be named: free, or named already")
        if block.name in self._page_of:
            return False
        self._blocks[page] = block
        self._page_of[block.name] = page
        if block.tail:
            return True
        if block.name in self._removed:
            del self._removed[block.name]
        else:
            self._stored[block.name] = None
        return True

    def forget_tail(self, name: BlockHash) -> None:
        """The checkpoint is gone, so nobody will ask for this tail again. Unknown names are ignored."""
        page = self._page_of.pop(name, None)
        if page is None:
            return
        self._blocks[page] = None
        if self._references[page] == 0:
            self._cached -= 1
            self._free.append(page)

    def blocks(self) -> list[Block]:
        """All named full blocks, parents before their children."""
        named = (block for block in self._blocks if block is not None and not block.tail)
        return sorted(named, key=lambda block: block.depth)

    def take_changes(self) -> tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]]:
        """Names that (appeared, went) since the last call; one that did both is in neither."""
        changes = tuple(self._stored), tuple(self._removed)
        self._stored.clear()
        self._removed.clear()
        return changes

    def check_integrity(self) -> None:
        """Raises AssertionError when the books disagree. O(pages log pages)."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        order = {entry[2] for entry in self._order if self._valid(entry)}
        cached = set()
        for page in range(self.size):
            block = self._blocks[page]
            assert self._references[page] >= 0, f"page {page} is held {self._references[page]} times"
            assert (page in free) == (self._references[page] == 0 and block is None), f"page {page} is lost"
            if block is not None:
                assert self._page_of[block.name] == page, f"page {page} has a name that leads elsewhere"
                if self._references[page] == 0:
                    cached.add(page)
        assert len(self._page_of) == sum(block is not None for block in self._blocks), "a name leads nowhere"
        assert len(cached) == self._cached, "the count of cached pages is wrong"
        assert cached == order, "a cached page can never be evicted"
