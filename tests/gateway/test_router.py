import random

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.router import RUNNING_COST, WAITING_COST, Candidate, choose
from services.protocol.events import EngineLoad


def engine(name: str, overlap: int = 0, assigned: int = 0, **load: int) -> Candidate:
    return Candidate(name, EngineLoad(**{"queue_capacity": 8, **load}), overlap, assigned)


def test_equal_engines_go_by_id() -> None:
    assert choose(10, [engine("b"), engine("c"), engine("a")]) == ["a", "b", "c"]
    assert choose(10, []) == []


def test_the_cache_decides_between_idle_engines() -> None:
    assert choose(10, [engine("a"), engine("b", overlap=3), engine("c", overlap=2)]) == ["b", "c", "a"]


def test_load_outweighs_a_small_overlap_and_not_a_large_one() -> None:
    few, many = int(RUNNING_COST) - 1, int(RUNNING_COST) + 1
    assert choose(100, [engine("warm", overlap=few, running=1), engine("idle")]) == ["idle", "warm"]
    assert choose(100, [engine("idle"), engine("warm", overlap=many, running=1)]) == ["warm", "idle"]
    assert choose(100, [engine("idle"), engine("warm", overlap=int(WAITING_COST) + 1, waiting=1)])[0] == "warm"


def test_a_full_queue_comes_last_whatever_it_has() -> None:
    full = engine("full", overlap=1000, waiting=8)
    assert choose(1000, [full, engine("busy", running=60, waiting=7)]) == ["busy", "full"]
    assert choose(1000, [engine("full", overlap=1000, waiting=7, assigned=1), engine("busy", waiting=7)])[0] == "busy"


def test_prefill_that_waits_there_counts_in_blocks() -> None:
    assert choose(1, [engine("a", pending_prefill_tokens=64 * 50), engine("b", running=2)]) == ["b", "a"]


def test_a_burst_within_one_heartbeat_spreads() -> None:
    assigned = {"a": 0, "b": 0, "c": 0}
    for _ in range(30):
        assigned[choose(5, [engine(n, assigned=k) for n, k in assigned.items()])[0]] += 1
    assert set(assigned.values()) == {10}


candidates = st.lists(
    st.builds(
        engine,
        st.sampled_from("abcdefgh"),
        overlap=st.integers(0, 50),
        assigned=st.integers(0, 9),
        running=st.integers(0, 64),
        waiting=st.integers(0, 9),
        pending_prefill_tokens=st.integers(0, 10**5),
    ),
    unique_by=lambda c: c.engine_id,
)


@given(candidates, st.integers(0, 50), st.randoms(use_true_random=False))
def test_every_engine_once_and_the_order_of_input_does_not_matter(
    engines: list[Candidate], blocks: int, rng: random.Random
) -> None:
    order = choose(blocks, engines)
    assert sorted(order) == sorted(c.engine_id for c in engines)
    shuffled = list(engines)
    rng.shuffle(shuffled)
    assert choose(blocks, shuffled) == order
    by_id = {c.engine_id: c for c in engines}
    full = [by_id[name].full for name in order]
    assert full == sorted(full)
