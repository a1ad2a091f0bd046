"""What the engine counts of its recurrent states: from the scheduler's books to the metrics."""

from collections import Counter

from prometheus_client import generate_latest

from services.engine.mailbox import StateLoad, StepStats
from services.engine.metrics import EngineMetrics
from tests.engine.rig import Rig, request
from tests.engine.test_resume import push_out, tokens

COUNTS = (
    "published_checkpoints",
    "evicted_checkpoints",
    "checkpoint_hits",
    "stored_checkpoints",
    "loaded_checkpoints",
)


def counted(rig: Rig) -> tuple[int, ...]:
    """All told so far, in the order of COUNTS."""
    totals: Counter[str] = Counter()
    for result in rig.results:
        totals.update({name: getattr(result.stats, name) for name in COUNTS})
    return tuple(totals[name] for name in COUNTS)


def test_each_event_is_told_once() -> None:
    rig = Rig(slots=8, kv=True)
    rig.serve(request("first", tokens(300), max_tokens=1))
    assert counted(rig) == (1, 0, 0, 1, 0)
    assert rig.results[-1].states == StateLoad(total=8, held=0, checkpoints=1)
    rig.serve(request("again", tokens(300), max_tokens=1))
    assert counted(rig) == (1, 0, 1, 1, 0)
    push_out(rig)
    rig.serve(request("restored", tokens(300), max_tokens=1))
    assert counted(rig) == (2, 1, 2, 1, 1)
    rig.settle()


def test_who_has_the_slots() -> None:
    """Two requests and no checkpoint yet; then the checkpoints that they leave."""
    rig = Rig(slots=8, max_batch_tokens=64)
    for name in ("a", "b"):
        rig.submit(request(name, tokens(100, ord(name)), max_tokens=3))
    rig.step()
    assert rig.results[-1].states == StateLoad(total=8, held=2, checkpoints=0)
    rig.run()
    states = rig.results[-1].states
    assert (states.held, states.checkpoints) == (0, rig.scheduler._checkpoints.on_device)
    assert states.checkpoints >= 2
    rig.settle()


def test_a_checkpoint_that_its_only_user_takes_over_is_a_hit() -> None:
    """With one slot nothing can be copied."""
    rig = Rig(slots=1)
    rig.serve(request("a", tokens(100), max_tokens=1))
    before = counted(rig)
    rig.serve(request("b", [*tokens(100), 1, 2], max_tokens=1))
    assert rig.usage("b").cached_device == 100
    hits = COUNTS.index("checkpoint_hits")
    assert counted(rig)[hits] == before[hits] + 1
    rig.settle()


def test_the_model_without_states_counts_none() -> None:
    rig = Rig(kv=True)
    rig.serve(request("a", tokens(300), max_tokens=5))
    assert counted(rig) == (0, 0, 0, 0, 0)
    assert all(result.states == StateLoad() for result in rig.results)
    rig.settle()


def test_exposition() -> None:
    metrics = EngineMetrics()
    metrics.states(StateLoad(total=10, held=2, checkpoints=5))
    metrics.step(StepStats(published_checkpoints=3, evicted_checkpoints=2, stored_checkpoints=1, loaded_checkpoints=4))
    metrics.step(StepStats(checkpoint_hits=6))
    text = generate_latest(metrics.registry).decode()
    for line in (
        'samovar_engine_states{owner="request"} 2.0',
        'samovar_engine_states{owner="checkpoint"} 5.0',
        'samovar_engine_states{owner="free"} 3.0',
        'samovar_engine_checkpoints_total{event="published"} 3.0',
        'samovar_engine_checkpoints_total{event="evicted"} 2.0',
        'samovar_engine_checkpoints_total{event="stored"} 1.0',
        'samovar_engine_checkpoints_total{event="loaded"} 4.0',
        'samovar_engine_checkpoints_total{event="hit"} 6.0',
    ):
        assert line in text
