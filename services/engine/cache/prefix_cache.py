"""Finds a sequence's prefix among the device's blocks, and names blocks once they are computed or restored."""

from itertools import takewhile

from services.engine.cache.block_pool import BlockPool
from services.engine.cache.content import Block
from services.engine.cache.owners import Owner
from services.protocol.hashing import BLOCK_TOKENS, BlockHash, extend


class BlockChain:
    """The blocks of one growing token sequence, each hashed once."""

    __slots__ = ("_names", "_root", "_tokens")

    def __init__(self, root: BlockHash, tokens: list[int]) -> None:
        """`tokens` is the sequence's own list; it only ever grows at its end."""
        self._root = root
        self._tokens = tokens
        self._names: list[BlockHash] = []

    @property
    def full(self) -> int:
        """How many blocks the tokens fill."""
        return len(self._tokens) // BLOCK_TOKENS

    def block(self, depth: int) -> Block:
        """The block at `depth`, below `full`."""
        names = self._names
        while len(names) <= depth:
            start = len(names) * BLOCK_TOKENS
            ids = self._tokens[start : start + BLOCK_TOKENS]
            if len(ids) < BLOCK_TOKENS:
                raise IndexError(f"block {depth} of {len(self._tokens)} tokens is not full")
            names.append(extend(names[-1] if names else self._root, ids))
        return Block(names[depth], names[depth - 1] if depth else b"", depth)

    def end(self, blocks: int) -> BlockHash:
        """The name of the last of the first `blocks` blocks, all of them full; the chain's root where there is none."""
        if blocks > len(self._names):
            self.block(blocks - 1)
        return self._names[blocks - 1] if blocks else self._root

    def common(self, other: "BlockChain") -> int:
        """How many tokens both begin with."""
        low, high = 0, min(self.full, other.full)
        while low < high:
            middle = (low + high + 1) // 2
            if self.end(middle) == other.end(middle):
                low = middle
            else:
                high = middle - 1
        start = low * BLOCK_TOKENS
        pairs = zip(self.ids(start, start + BLOCK_TOKENS), other.ids(start, start + BLOCK_TOKENS), strict=False)
        return start + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def ids(self, start: int, end: int) -> tuple[int, ...]:
        """The tokens at [start, end), as far as there are any."""
        return tuple(self._tokens[start:end])


class PrefixCache:
    """The device's blocks by content. Holds no state of its own besides the pool's."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def match(self, chain: BlockChain, start: int = 0) -> list[int]:
        """Pages of the longest run of the chain's blocks from `start` on. Nothing is acquired."""
        pages: list[int] = []
        for depth in range(start, chain.full):
            page = self._pool.find(chain.block(depth).name)
            if page is None:
                break
            pages.append(page)
        return pages

    def insert(self, block: Block, page: int, owner: Owner | None = None) -> tuple[int, bool]:
        """Make a held page's content findable, which a request of `owner` has computed or restored; its bytes must be
        complete.

        Returns (page, whether the block is new). Where another page has the content already, the caller's hold moves
        to that page: so whoever holds a block also holds the named pages of its parents.
        """
        if self._pool.name(page, block, owner):
            return page, True
        known = self._pool.find(block.name)
        assert known is not None  # or it would have been named
        self._pool.acquire((known,))
        self._pool.release((page,))
        return known, False
