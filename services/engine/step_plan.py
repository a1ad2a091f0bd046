"""What the scheduler has decided on for the next step so far."""

from services.engine.sequence import Sequence
from services.protocol.kv import Key


class StepPlan:
    """How many tokens of which requests the next step runs."""

    __slots__ = ("checkpoints", "counts", "left")

    def __init__(self, budget: int) -> None:
        self.checkpoints: set[Key] = set()
        """Those that will be taken at the ends of rows."""
        self.counts: dict[Sequence, int] = {}
        self.left = budget

    def add(self, sequence: Sequence, count: int) -> None:
        self.counts[sequence] = count
        self.left -= max(1, count)

    def drop(self, sequence: Sequence) -> None:
        """Where it is planned, do not run it after all."""
        if (count := self.counts.pop(sequence, None)) is not None:
            self.left += max(1, count)
