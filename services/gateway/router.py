"""Which engine should get a request: a pure function of what each has cached and how busy it is.

The unit of cost is one block of prefill (64 tokens): what the engine would compute for this request before its first
token, plus what it has to do before and beside it.

    cost = blocks of the prompt that are not on the device
         + blocks of prefill already waiting there
         + RUNNING_COST * running requests     (each shares every step with ours)
         + WAITING_COST * waiting requests     (each comes before ours)

The weights say: rather compute up to 4 blocks again than join one more running stream, up to 16 than stand behind one
more waiting request. They are a judgement, not a measurement. A routing mistake costs time, never an answer.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from services.protocol.events import EngineLoad

RUNNING_COST = 4.0
WAITING_COST = 16.0


@dataclass(frozen=True, slots=True)
class Candidate:
    engine_id: str
    load: EngineLoad
    """As of the engine's last heartbeat."""
    overlap: int = 0
    """Leading blocks of the prompt on its device."""
    assigned: int = 0
    """Open requests that this gateway gave it since that heartbeat: they count as waiting, so that a burst within one
    heartbeat spreads over the engines."""

    @property
    def waiting(self) -> int:
        return self.load.waiting + self.assigned

    @property
    def full(self) -> bool:
        """Its queue takes no more (the engine itself decides; this only orders the attempts)."""
        return 0 < self.load.queue_capacity <= self.waiting


def cost(blocks: int, candidate: Candidate, block_tokens: int) -> float:
    return (
        max(0, blocks - candidate.overlap)
        + candidate.load.pending_prefill_tokens / block_tokens
        + RUNNING_COST * candidate.load.running
        + WAITING_COST * candidate.waiting
    )


def choose(blocks: int, candidates: Iterable[Candidate], block_tokens: int = 64) -> list[str]:
    """Engine ids in order of preference: full queues last, then by cost, equal ones by id.

    `blocks`: full blocks of the prompt.
    """
    ranked = sorted(candidates, key=lambda c: (c.full, cost(blocks, c, block_tokens), c.engine_id))
    return [candidate.engine_id for candidate in ranked]
