"""Device pages: who holds them, which content they have, and in what order they are given up. Bookkeeping only."""

import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from services.engine.cache.content import Block, Content
from services.engine.cache.gone import Gone
from services.engine.cache.owners import Owner
from services.protocol.hashing import BlockHash


class Page(NamedTuple):
    """What a named page has, for who looks at the pool from outside."""

    page: int
    block: Block
    held: bool
    stored: bool
    shared: bool
    owner: Owner | None
    last_use: float


class BlockPool:
    """Pages 0..n-1, each in one of three states.

    * free: nobody holds it and its bytes mean nothing;
    * held: its reference count is above 0;
    * cached: nobody holds it, but it has a name; it is taken back when the free pages run out.

    Of the cached pages that no other named page follows in a chain, the one of least worth goes first
    (`services.protocol.worth`: cost of computing it again, chance that its session comes back, time since its last
    use; all pages have the same size). So a chain is given up from its end, and what several contexts begin with stays
    as long as one of them. Where all cached pages have followers (that are held: a copy to the kvstore holds a page
    without its parents), the least worth of all goes.

    With a `recurrent` model, nobody can go on from the last block of a chain unless a checkpoint of the state ends
    with it: then it is worth nothing.

    Owned by the core's thread. All operations are O(1) a page, O(log n) where a page becomes a chain's end.
    """

    def __init__(self, pages: int, recurrent: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        if pages < 1:
            raise ValueError(f"a pool of {pages} pages holds nothing")
        self.size = pages
        self.gone = Gone()
        self.evictions = 0
        """Cached pages given up since the start."""
        self._recurrent = recurrent
        self._clock = clock
        self._free = list(range(pages - 1, -1, -1))
        self._references = [0] * pages
        self._contents: list[Content | None] = [None] * pages
        self._page_of: dict[BlockHash, int] = {}
        self._children: dict[BlockHash, int] = {}
        """Named pages by the name of the block before theirs, whether that is on the device or not."""
        self._resumable: set[BlockHash] = set()
        """Names, on the device or not, of the last full blocks of checkpoints."""
        self._cached = 0
        self._unsafe = 0
        # (score, -depth, page) of each cached page without children, and void entries: a page's score may have changed
        # since. One that fell has another entry, one that rose is put where it belongs when it comes up.
        self._order: list[tuple[float, int, int]] = []
        self._stored: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: free and cached ones."""
        return len(self._free) + self._cached

    @property
    def safe(self) -> int:
        """Those of the `available` pages that may go at once: the others are about to be copied to the kvstore."""
        return self.available - self._unsafe

    # Who holds pages.

    def allocate(self, count: int, taker: str = "") -> list[int]:
        """Take `count` pages, held once each and nameless, for a request of the session `taker`. Raises ValueError when
        fewer are available."""
        if count > self.available:
            raise ValueError(f"{count} pages wanted, {self.available} available")
        while len(self._free) < count:
            self._evict(taker)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def acquire(self, pages: Iterable[int]) -> None:
        """Hold named or held pages once more."""
        for page in pages:
            if self._references[page] == 0:
                content = self._contents[page]
                if content is None:
                    raise ValueError(f"page {page} is free")
                self._cached -= 1
                self._unsafe -= content.pending
            self._references[page] += 1

    def release(self, pages: Iterable[int], owner: Owner | None = None) -> None:
        """Give one hold of each page back. `owner`: whose request used their content just now; None: nobody did (a
        transfer). Pages released together count as used at the same time."""
        now = self._clock() if owner is not None else 0.0
        last: BlockHash = b""
        for page in pages:
            references = self._references[page] - 1
            if references < 0:
                raise ValueError(f"page {page} is released more often than held")
            self._references[page] = references
            content = self._contents[page]
            if content is not None and owner is not None:
                content.last_use = now
                content.shared |= content.owner is not None and content.owner is not owner
                content.owner = owner
                last = content.block.name
            if references == 0:
                if content is None:
                    self._free.append(page)
                else:
                    self._cached += 1
                    self._unsafe += content.pending
                    self._offer(page, content)
        if owner is not None and last:
            owner.ends_at(last)

    def held(self, page: int) -> bool:
        return self._references[page] > 0

    # What is in them.

    def now(self) -> float:
        """Of the clock by which `Page.last_use` counts."""
        return self._clock()

    def find(self, name: BlockHash) -> int | None:
        """The page that has this content, held or cached."""
        return self._page_of.get(name)

    def name(self, page: int, block: Block, owner: Owner | None = None) -> bool:
        """Say what a held page contains, for whose request. False, and nothing is changed, when another page has that
        name already."""
        if self._references[page] == 0 or self._contents[page] is not None:
            raise ValueError(f"page {page} cannot be named: free, or named already")
        if block.name in self._page_of:
            return False
        self._contents[page] = Content(block, self._clock(), owner)
        self._page_of[block.name] = page
        if block.parent:
            self._children[block.parent] = self._children.get(block.parent, 0) + 1
        self.gone.back(block.name)
        if block.tail:
            return True
        if block.name in self._removed:
            del self._removed[block.name]
        else:
            self._stored[block.name] = None
        return True

    def forget_tail(self, name: BlockHash) -> None:
        """The checkpoint is gone, so nobody will ask for this tail again. Unknown names are ignored."""
        page = self._page_of.get(name)
        content = None if page is None else self._contents[page]
        if page is None or content is None:
            return
        self._unname(page, content)
        if self._references[page] == 0:
            self._cached -= 1
            self._unsafe -= content.pending
            self._free.append(page)

    def owner(self, name: BlockHash) -> Owner | None:
        """The session that used a block last; None too where that is unknown."""
        content = self._content(name)
        return None if content is None else content.owner

    def shared(self, name: BlockHash) -> bool:
        """Whether several sessions have used a block that is on the device."""
        content = self._content(name)
        return content is not None and content.shared

    # What it is worth.

    def to_be_kept(self, name: BlockHash, pending: bool) -> None:
        """Whether a block is about to be copied to the kvstore. Unknown names are ignored."""
        page, content = self._page_of.get(name), self._content(name)
        if page is None or content is None or content.pending == pending:
            return
        content.pending = pending
        if self._references[page] == 0:
            self._unsafe += 1 if pending else -1
            self._offer(page, content)

    def kept_elsewhere(self, name: BlockHash, refused: bool = False) -> None:
        """The kvstore has this block; `refused`: it has not, and no room for it. Unknown names are ignored."""
        content = self._content(name)
        if content is not None:
            content.stored, content.refused = not refused, refused
            self._reconsider(name, content)

    def kept_here_only(self) -> None:
        """What the kvstore had is lost."""
        for content in self._contents:
            if content is not None:
                content.stored = content.refused = False
        self.gone.another_store()

    def weigh(self, owner: Owner) -> None:
        """The standing of a session has changed."""
        for name in owner.tips:
            content = self._content(name)
            if content is not None:
                self._reconsider(name, content)

    def resumable(self, name: BlockHash, resumable: bool) -> None:
        """Whether a checkpoint ends with this block, or in the partial block behind it."""
        if resumable:
            self._resumable.add(name)
            return
        self._resumable.discard(name)
        content = self._content(name)
        if content is not None:
            self._reconsider(name, content)

    # What others are told.

    def pages(self) -> Iterator[Page]:
        """All named pages, in no order."""
        for page, content in enumerate(self._contents):
            if content is not None:
                yield Page(
                    page,
                    content.block,
                    self._references[page] > 0,
                    content.stored,
                    content.shared,
                    content.owner,
                    content.last_use,
                )

    def blocks(self) -> list[Block]:
        """All named full blocks, parents before their children."""
        named = (content.block for content in self._contents if content is not None and not content.block.tail)
        return sorted(named, key=lambda block: block.depth)

    def take_changes(self) -> tuple[tuple[BlockHash, ...], tuple[BlockHash, ...]]:
        """Names that (appeared, went) since the last call; one that did both is in neither."""
        changes = tuple(self._stored), tuple(self._removed)
        self._stored.clear()
        self._removed.clear()
        return changes

    # Inside.

    def _content(self, name: BlockHash) -> Content | None:
        page = self._page_of.get(name)
        return None if page is None else self._contents[page]

    def _followed(self, content: Content) -> bool:
        return not content.block.tail and content.block.name in self._children

    def _score(self, content: Content) -> float:
        block = content.block
        return content.worth(useless=self._recurrent and not block.tail and block.name not in self._resumable)

    def _offer(self, page: int, content: Content) -> None:
        """Put a page into the order, if it is one that may be given up."""
        if self._references[page] or self._followed(content):
            return
        if len(self._order) > 4 * self.size:  # mostly void entries
            self._order = [
                (self._score(other), -other.block.depth, number)
                for number, other in enumerate(self._contents)
                if other is not None and not self._references[number] and not self._followed(other)
            ]
            heapq.heapify(self._order)
        heapq.heappush(self._order, (self._score(content), -content.block.depth, page))

    def _reconsider(self, name: BlockHash, content: Content) -> None:
        self._offer(self._page_of[name], content)

    def _victim(self) -> int:
        while self._order:
            score, _, page = heapq.heappop(self._order)
            content = self._contents[page]
            if content is None or self._references[page] or self._followed(content):
                continue
            if self._score(content) > score:
                self._offer(page, content)
                continue
            return page
        cached = (
            (self._score(content), -content.block.depth, page)
            for page, content in enumerate(self._contents)
            if content is not None and not self._references[page]
        )
        return min(cached)[2]

    def _evict(self, taker: str) -> None:
        page = self._victim()
        content = self._contents[page]
        assert content is not None  # a cached page has a name
        block = content.block
        self._unname(page, content)
        self._cached -= 1
        self._unsafe -= content.pending
        self.evictions += 1
        self._free.append(page)
        if content.owner is not None:
            content.owner.lost(block.name, block.parent)
        if block.tail:
            return
        self.gone.left(
            block.name,
            block.parent,
            block.depth,
            session="" if content.owner is None else content.owner.session,
            taker=taker,
            stored=content.stored,
            refused=content.refused,
        )
        if block.name in self._stored:
            del self._stored[block.name]
        else:
            self._removed[block.name] = None

    def _unname(self, page: int, content: Content) -> None:
        block = content.block
        self._contents[page] = None
        del self._page_of[block.name]
        if not block.parent:
            return
        self._children[block.parent] -= 1
        if self._children[block.parent]:
            return
        del self._children[block.parent]
        parent = self._content(block.parent)
        if parent is not None:
            self._reconsider(block.parent, parent)

    def check_integrity(self) -> None:
        """Raises AssertionError when the books disagree. O(pages log pages)."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        order = {entry[2] for entry in self._order}
        cached = unsafe = 0
        children: dict[BlockHash, int] = {}
        for page in range(self.size):
            content = self._contents[page]
            assert self._references[page] >= 0, f"page {page} is held {self._references[page]} times"
            assert (page in free) == (self._references[page] == 0 and content is None), f"page {page} is lost"
            if content is None:
                continue
            block = content.block
            assert self._page_of[block.name] == page, f"page {page} has a name that leads elsewhere"
            if block.parent:
                children[block.parent] = children.get(block.parent, 0) + 1
            if self._references[page] == 0:
                cached += 1
                unsafe += content.pending
                assert self._followed(content) or page in order, f"page {page} can never be evicted"
        assert len(self._page_of) == sum(content is not None for content in self._contents), "a name leads nowhere"
        assert cached == self._cached, "the count of cached pages is wrong"
        assert unsafe == self._unsafe, "the count of pages that are about to be copied is wrong"
        assert children == self._children, "the count of a block's children is wrong"
