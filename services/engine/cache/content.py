"""What a page of the device holds, and what it is worth to keep."""

import math
from typing import NamedTuple

from services.engine.cache.owners import Owner
from services.engine.cache.recompute_cost import weight
from services.protocol import worth
from services.protocol.hashing import BLOCK_TOKENS, BlockHash

STORED_BITS = 4.0
"""A page that the kvstore has as well is worth 1/16: losing it costs a copy over the bus and not the computing, which
takes far more than 16 times as long, but the store may give its own copy up. By `worth.HALF_LIFE`, one that is
nowhere else is kept 40 minutes longer."""
PENDING_BITS = 32.0
"""What is about to be copied to the kvstore goes last: a moment later it can go and nothing is lost."""
USELESS_BITS = 64.0
"""What nobody can go on from goes first."""


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


class Content:
    """What a named page holds, and what is known of its use. The pool's to change."""

    __slots__ = ("block", "density", "last_use", "owner", "pending", "refused", "shared", "stored")

    def __init__(self, block: Block, now: float, owner: Owner | None) -> None:
        start = block.depth * BLOCK_TOKENS
        self.block = block
        self.density = math.log2(weight(start, start + BLOCK_TOKENS))
        """log2 of what it takes to compute it again, in tokens at depth 0."""
        self.last_use = now
        self.owner = owner
        """The session that used it last; None: not known."""
        self.pending = False
        """It is about to be copied to the kvstore."""
        self.shared = False
        """Several sessions have used it."""
        self.stored = False
        """The kvstore has it, as far as we know."""
        self.refused = False
        """The kvstore had no room for it."""

    def worth(self, useless: bool) -> float:
        """On the scale of `worth.score`; `useless`: nobody can go on from it."""
        chance = worth.SHARED if self.shared or self.owner is None else self.owner.chance
        density = self.density - STORED_BITS * self.stored - USELESS_BITS * useless + PENDING_BITS * self.pending
        return worth.score(density, chance, self.last_use)
