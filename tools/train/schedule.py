"""What a training sees when, and how fast it learns: both functions of the step, so that a run can be repeated."""

from collections.abc import Mapping
from dataclasses import dataclass

from tools.train.tasks.rows import Mix

LONG_ROWS = (8192, 16384, 32768, 65536)
MIX_EARLY: Mix = {
    "python": 0.21,
    "english": 0.17,
    "induction": 0.08,
    "facts": 0.24,
    "needle": 0.10,
    "tools": 0.13,
    "chat": 0.07,
}
MIX: Mix = {"python": 0.20, "english": 0.15, "facts": 0.12, "needle": 0.10, "tools": 0.34, "chat": 0.09}
MIX_LONG: Mix = {"python": 0.08, "english": 0.05, "facts": 0.22, "needle": 0.65}


@dataclass(frozen=True, slots=True)
class Phase:
    until: float
    """The share of all steps at which it ends."""
    short: tuple[int, ...]
    """Row lengths of the micro-batch that every step has; one is drawn."""
    mix: Mix
    long: tuple[int, ...] = ()
    """Row lengths of a second micro-batch of the same step. A long one alone supervises few tokens; beside a short one
    the update stays calm."""


Plan = tuple[Phase, ...]
PLANS: Mapping[str, Plan] = {
    # from nothing: copying first, then length
    "early": (
        Phase(0.12, (1024,), MIX_EARLY),
        Phase(0.50, (2048,), MIX_EARLY),
        Phase(0.80, (2048, 8192), MIX),
        Phase(1.00, (2048,), MIX, LONG_ROWS),
    ),
    # from trained weights
    "late": (
        Phase(0.45, (2048, 2048, 8192), MIX),
        Phase(1.00, (2048,), MIX, LONG_ROWS),
    ),
}


def phase_at(plan: Plan, step: int, steps: int) -> Phase:
    return next((phase for phase in plan if step < phase.until * steps), plan[-1])


@dataclass(frozen=True, slots=True)
class Rate:
    """The learning rate: a linear rise, flat, then a linear fall to `floor` of the peak."""

    peak: float
    fall: float
    """The last share of the run in which it falls, in (0, 1]."""
    floor: float
    rise_steps: int = 60

    def scale(self, step: int, progress: float) -> float:
        """Of the peak, for the step (from 0) that starts when `progress` in [0, 1] of the run is over."""
        rise = min(1.0, (step + 1) / self.rise_steps)
        return rise * min(1.0, max(self.floor, (1.0 - progress) / self.fall))
