import math
import random

import pytest

from services.kvstore.eviction import VictimQueue
from services.kvstore.stored import Stored
from services.protocol.worth import density, score


def stored(value: float) -> Stored:
    return Stored(b"k", b"", "model", 4096, 1.0, 1.0, 0.0, score=value)


def test_scores_order_as_decayed_values_do_at_any_time() -> None:
    draw = random.Random(3)
    objects = [(draw.uniform(0.001, 10), draw.randrange(1, 2**22), draw.uniform(0, 5000)) for _ in range(50)]

    def value(cost: float, length: int, used: float, now: float) -> float:
        return cost / length * 2 ** -((now - used) / 600)

    by_score = sorted(objects, key=lambda o: score(density(o[0], o[1]), 1.0, o[2], half_life=600))
    for now in (5000.0, 9000.0):
        assert by_score == sorted(objects, key=lambda o: value(*o, now))


def test_an_object_worth_four_times_as_much_lasts_two_half_lives_longer() -> None:
    assert score(density(4.0, 4096), 1.0, 0, 100) == pytest.approx(score(density(1.0, 4096), 1.0, 200, 100))


def test_costs_are_clamped_so_that_none_is_kept_for_ever() -> None:
    assert density(0.0, 4096) == density(1e-9, 4096) > -math.inf
    assert density(1e30, 4096) == density(3600, 4096)


def test_least_first_and_only_below_the_bound() -> None:
    queue = VictimQueue()
    low, middle, high = stored(1), stored(2), stored(3)
    for item in (high, low, middle):
        queue.push(item)
    assert queue.pop(below=1) is None
    assert queue.pop(below=2.5) is low
    assert queue.pop(below=2.5) is middle
    assert queue.pop(below=2.5) is None
    assert queue.pop(below=math.inf) is high
    assert queue.pop(below=math.inf) is None


def test_a_use_moves_an_object_back() -> None:
    queue = VictimQueue()
    used, other = stored(1), stored(2)
    queue.push(used)
    queue.push(other)
    used.score = 3
    assert queue.pop(below=3) is other
    assert queue.pop(below=3) is None
    assert queue.pop(below=4) is used


def test_a_score_that_fell_moves_an_object_forward() -> None:
    queue = VictimQueue()
    weighed, other = stored(3), stored(2)
    queue.push(weighed)
    queue.push(other)
    weighed.score = 1
    queue.fell(weighed)
    weighed.score = 0
    queue.fell(weighed)
    assert queue.pop(below=1) is weighed
    assert [queue.pop(below=9), queue.pop(below=9)] == [other, None]
    weighed.score = 5
    queue.fell(weighed)
    assert queue.pop(below=9) is None


def test_up_and_down_again_is_still_one_entry() -> None:
    queue = VictimQueue()
    item, other = stored(5), stored(4)
    queue.push(item)
    queue.push(other)
    for now in (3.0, 7.0, 3.0, 5.0, 2.0):
        item.score = now
        queue.fell(item)
    item.score = 5
    assert [queue.pop(below=9), queue.pop(below=9), queue.pop(below=9)] == [other, item, None]


def test_stale_entries_do_not_pile_up() -> None:
    queue = VictimQueue()
    item = stored(0)
    queue.push(item)
    for number in range(10_000):
        item.score = -number
        queue.fell(item)
    assert len(queue) < 100
    assert queue.pop(below=0) is item


def test_pushing_twice_keeps_one_entry() -> None:
    queue = VictimQueue()
    item = stored(1)
    queue.push(item)
    queue.push(item)
    assert len(queue) == 1
    assert queue.pop(below=9) is item
    queue.push(item)
    assert queue.pop(below=9) is item


def test_forgotten_objects_do_not_pile_up() -> None:
    queue = VictimQueue()
    kept = [stored(i) for i in range(10)]
    for item in kept:
        queue.push(item)
    for i in range(10_000):
        item = stored(100 + i)
        queue.push(item)
        item.kept = False
        queue.forget(item)
    assert len(queue) < 200
    assert [queue.pop(below=math.inf) for _ in range(11)] == [*kept, None]
