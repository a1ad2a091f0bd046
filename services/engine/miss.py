"""Why a request has to compute what it has to compute."""

from services.engine.cache.block_pool import BlockPool
from services.engine.cache.checkpoints import Mark
from services.engine.cache.gone import Departure
from services.engine.sequence import Sequence
from services.protocol.generate import Missed
from services.protocol.hashing import BLOCK_TOKENS

MOST_MARKS = 16
"""Positions at which a checkpoint of this prompt may have been, that are looked for, the deepest first."""


def missed(sequence: Sequence, pool: BlockPool, *, connected: bool, recurrent: bool) -> Missed | None:
    """Of a request that is about to get pages for its first step; `connected`: the kvstore is there. None where nothing
    could have been found: less than a block remains, or with a recurrent model less than a token."""
    position, prompt = sequence.computed, len(sequence.request.prompt)
    if prompt - position < (1 if recurrent else BLOCK_TOKENS):
        return None
    chain, depth = sequence.chain, position // BLOCK_TOKENS
    here = depth
    while here < chain.full and pool.find(chain.block(here).name) is not None:
        here += 1
    departure = pool.gone.find(chain.block(here).name) if here < chain.full else None
    if departure is not None:
        seen = here + 1
        while seen < chain.full and _known(pool, chain.block(seen).name):
            seen += 1
        return _gone(position, seen * BLOCK_TOKENS, departure, connected)
    if recurrent:
        hints = [hint for hint in sequence.request.hints if position < hint <= prompt]
        for end in sorted({prompt, *hints}, reverse=True)[:MOST_MARKS]:
            departure = pool.gone.find(Mark.of(chain, end).key)
            if departure is not None:
                return _gone(position, end, departure, connected)
    if here > depth:
        return Missed(reason="no_checkpoint", position=position, seen=here * BLOCK_TOKENS)
    return Missed(reason="new", position=position)


def _known(pool: BlockPool, name: bytes) -> bool:
    return pool.find(name) is not None or pool.gone.find(name) is not None


def _gone(position: int, seen: int, departure: Departure, connected: bool) -> Missed:
    return Missed(
        reason=departure.reason(connected),
        position=position,
        seen=seen,
        since=departure.when,
        taker=departure.taker,
    )
