"""What the scheduler has decided on for the next step so far."""

from services.engine.sequence import Sequence


class StepPlan:
    """How many tokens of which requests the next step runs."""

    __slots__ = ("awaited", "counts", "left", "preempted")

    def __init__(self, budget: int) -> None:
        self.awaited: set[bytes] = set()
        """Names of blocks or checkpoints that its prefills are on their way to."""
        self.counts: dict[Sequence, int] = {}
        self.left = budget
        self.preempted: list[Sequence] = []

    def add(self, sequence: Sequence, count: int) -> None:
        self.counts[sequence] = count
        self.left -= max(1, count)

    def preempt(self, sequence: Sequence) -> None:
        """Do not run it after all, where it is planned."""
        self.preempted.append(sequence)
        if (count := self.counts.pop(sequence, None)) is not None:
            self.left += max(1, count)
