"""Preemption on demand."""

from services.engine.scheduler import Scheduler
from services.engine.sequence import Sequence
from services.engine.step_plan import StepPlan


def preempt(scheduler: Scheduler, sequence: Sequence) -> None:
    """Between two steps, as if an older request had needed its pages."""
    plan = StepPlan(0)
    scheduler._planner._running = scheduler._running
    scheduler._planner._preempt(sequence, plan)
    scheduler._requeue(plan)
