"""The scheduler under everything at once. The rig and the fakes check each step; `settle` checks that all ends.

A failure of the seeded test is repeated by its seed; the state machine shrinks what it finds.
"""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.engine.batch import Transfer
from services.protocol.hashing import BLOCK_TOKENS
from tests.engine.rig import Rig, request
from tests.fakes import Fate, continuation

STOP = 7


class Storm:
    """One random run: a rig of random size under random events, with rates that differ from run to run."""

    def __init__(self, seed: int, recurrent: bool = False) -> None:
        self.random = rng = random.Random(seed)
        self.recurrent = recurrent
        self.kv = rng.random() < 0.9
        self.rig = Rig(
            pages=rng.choice([5, 8, 13, 40] if recurrent else [2, 5, 8, 10, 13]),
            max_batch_tokens=rng.choice([7, 64, 100, 256, 1024]),
            max_running=rng.choice([1, 2, 4, 8]),
            max_model_len=rng.choice([100_000, 300]),
            kv=self.kv,
            kv_capacity=rng.choice([4, 40, 200]),
            kv_automatic=False,
            slots=rng.choice([1, 2, 3, 5, 20]) if recurrent else 0,
            interval=rng.choice([64, 192, 8192]) if recurrent else 8192,
            gap=rng.choice([1, 20, 64]) if recurrent else 64,
        )
        self.waits = rng.choice([0.0, 0.3, 0.7])
        self.fails = rng.choice([0.0, 0.05, 0.3])
        self.answers = rng.choice([0.1, 0.5, 1.0])
        self.empty = rng.choice([0.0, 0.1])
        self.breaks = rng.choice([0.0, 0.0, 0.01])
        self.cancels = rng.choice([0.01, 0.03, 0.2])
        self.submits = rng.choice([0.2, 0.5, 0.9])
        self.short = rng.choice([0.2, 0.95])
        self.outputs = rng.choice([[1, 2, 8], [1, 8, 40], [70, 300]])
        self.returns = rng.choice([0.3, 0.8])
        burst = rng.choice([0, 3])
        self.rig.runner.fate = self.fate
        self.rig.runner.burst = lambda name, position: rng.randint(0, burst) if burst else 1
        self.bases = [[rng.randrange(251) for _ in range(64 * 13)] for _ in range(5)]
        self.contexts: list[list[int]] = []

    def fate(self, transfer: Transfer) -> Fate:
        if self.random.random() < self.waits:
            return "wait"
        return "failed" if self.random.random() < self.fails else "done"

    def prompt(self) -> list[int]:
        """Of a few families, so that prefixes are shared; often a whole number of blocks; or a next turn."""
        rng, most = self.random, min(self.rig.max_model_len - 1, BLOCK_TOKENS * self.rig.pages - 1)
        if rng.random() < self.short:
            most = min(most, rng.choice([60, 130, 260]))
        if self.contexts and rng.random() < self.returns:
            return [*rng.choice(self.contexts), rng.randrange(251)][:most]
        length = rng.randint(min(most, rng.choice([1, 64, 128])), most)
        if rng.random() < 0.5:
            length = max(1, length // BLOCK_TOKENS * BLOCK_TOKENS)
        prompt = rng.choice(self.bases)[:length]
        if rng.random() < 0.2:
            prompt[rng.choice([0, -1])] = rng.randrange(251)
        return prompt

    def submit(self) -> None:
        rng, prompt = self.random, self.prompt()
        salt = rng.choice(["", "", "", "salt"])
        most = rng.choice(self.outputs)
        generated = continuation(prompt, rng.randint(0, min(most, 20)), salt) if rng.random() < 0.15 else []
        stop = (STOP,) if rng.random() < 0.5 and STOP not in generated else ()
        hints: tuple[int, ...] = ()
        if self.recurrent and rng.random() < 0.8:
            hints = tuple(sorted({min(len(prompt), rng.choice([5, 64, 70, 128, 200, 300, 500])) for _ in range(4)}))
            if rng.random() < 0.5:
                hints = (*hints, len(prompt) + rng.choice([-3, 0, 1]))
        self.rig.submit(request(f"r{len(self.rig.requests)}", prompt, most, generated, stop, salt, hints))

    def turn(self) -> None:
        rig, rng = self.rig, self.random
        if rng.random() < self.submits and len(rig.requests) - len(rig.final) < 12:
            self.submit()
        if rng.random() < self.cancels:
            alive = [name for name in rig.requests if name not in rig.final]
            rig.cancel(rng.choice([*alive, "nobody", "r0"]))
        if self.kv and rng.random() < self.breaks:
            (rig.store.connect if rig.store.arena is None else rig.store.disconnect)()
        if rig.store.committed and rng.random() < 0.05:
            rig.store.forget(rng.choice(sorted(rig.store.committed)))
        for _ in range(len(rig.store.calls)):
            if rng.random() < self.answers:
                rig.store.answer(rng.randrange(len(rig.store.calls)), empty=rng.random() < self.empty)
        before = len(rig.final)
        rig.step()
        if len(rig.final) > before:
            self.contexts = [rig.prompts[name] + rig.told[name] for name in list(rig.final)[-40:]]


def storm(seed: int, turns: int = 300, recurrent: bool = False) -> Rig:
    run = Storm(seed, recurrent)
    for _ in range(turns):
        run.turn()
    run.rig.settle()
    return run.rig


@pytest.mark.parametrize("seed", range(40))
def test_a_storm_leaves_nothing_behind(seed: int) -> None:
    storm(seed)


@pytest.mark.parametrize("seed", range(60))
def test_a_storm_over_checkpoints_leaves_nothing_behind(seed: int) -> None:
    storm(seed, recurrent=True)


class Machine(RuleBasedStateMachine):
    """The same, step by step in hypothesis' hands."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(pages=1)
        self.fates: list[Fate] = []

    @initialize(
        pages=st.integers(2, 8),
        tokens=st.sampled_from([2, 64, 200]),
        running=st.integers(1, 4),
        capacity=st.sampled_from([2, 50]),
        slots=st.sampled_from([0, 0, 1, 2, 5]),
        bursts=st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any),
    )
    def begin(self, pages: int, tokens: int, running: int, capacity: int, slots: int, bursts: list[int]) -> None:
        self.rig = Rig(
            pages,
            max_batch_tokens=tokens,
            max_running=running,
            kv=True,
            kv_capacity=capacity,
            kv_automatic=False,
            slots=slots,
            interval=128,
            gap=16,
        )
        self.rig.runner.fate = lambda transfer: self.fates.pop() if self.fates else "done"
        self.rig.runner.burst = lambda name, position: bursts[position % len(bursts)]

    @rule(
        family=st.integers(0, 1),
        blocks=st.integers(0, 7),
        more=st.sampled_from([0, 1, 63]),
        most=st.integers(1, 90),
        hints=st.sampled_from([(), (70, 100), (64, 128, 200)]),
    )
    def submit(self, family: int, blocks: int, more: int, most: int, hints: tuple[int, ...]) -> None:
        length = max(1, min(64 * blocks + more, 64 * self.rig.pages - 1))
        self.rig.submit(request(f"r{len(self.rig.requests)}", [family] * length, most, stop=(STOP,), hints=hints))

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.rig.cancel(data.draw(st.sampled_from(sorted(self.rig.requests))))

    @rule(steps=st.integers(1, 5), fates=st.lists(st.sampled_from(["done", "failed", "wait"]), max_size=5))
    def step(self, steps: int, fates: list[Fate]) -> None:
        self.fates = fates
        for _ in range(steps):
            self.rig.step()

    @precondition(lambda self: self.rig.store.calls)
    @rule(last=st.booleans(), empty=st.booleans())
    def answer(self, last: bool, empty: bool) -> None:
        self.rig.store.answer(-1 if last else 0, empty)

    @rule()
    def lose_or_find_the_store(self) -> None:
        (self.rig.store.connect if self.rig.store.arena is None else self.rig.store.disconnect)()

    @precondition(lambda self: self.rig.store.committed)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.rig.store.forget(data.draw(st.sampled_from(sorted(self.rig.store.committed))))

    @invariant()
    def sound(self) -> None:
        self.rig.scheduler.check_integrity()

    def teardown(self) -> None:
        self.rig.settle()


Machine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_no_order_of_events_breaks_it = Machine.TestCase
