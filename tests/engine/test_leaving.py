"""A client that leaves and asks again, beside one that stays: what each step of the scheduler does about it."""

from collections.abc import Callable

import pytest

from services.engine.request import State
from tests.engine.rig import Rig, request
from tests.engine.test_resume import push_out, tokens

CHUNK = 128
CHUNKS = 40
LEAVES_AFTER = 20
slots = pytest.mark.parametrize("slots", [0, 6])


def beside_one_that_decodes(slots: int, answer: int, kv: bool = False) -> Rig:
    """Two places, one of which `stays` has: it decodes `answer` tokens, one a step."""
    rig = Rig(pages=128, max_batch_tokens=CHUNK + 2, max_running=2, slots=slots, kv=kv)
    rig.submit(request("stays", tokens(100, 1), max_tokens=answer))
    while not rig.told["stays"]:
        rig.step()
    return rig


def step(rig: Rig) -> None:
    """One step, in which `stays` gets its token."""
    told = len(rig.told["stays"])
    rig.step()
    assert len(rig.told["stays"]) == told + 1


def leave(rig: Rig, name: str) -> None:
    """Its place is free after the step that follows."""
    running, waiting = rig.load.running, rig.load.waiting
    was = rig.requests[name].state
    rig.cancel(name)
    step(rig)
    assert rig.finish_of(name) == "cancel"
    assert rig.told[name] == []
    gone = (0, 1) if was is State.WAITING else (1, 0)
    assert (rig.load.running, rig.load.waiting) == (running - gone[0], waiting - gone[1])


@slots
def test_what_was_read_before_leaving_is_not_read_again(slots: int) -> None:
    rig = beside_one_that_decodes(slots, 3 * CHUNKS)
    body = tokens(CHUNKS * CHUNK)
    read = 0
    for attempt in ("first", "second"):
        rig.submit(request(attempt, body))
        for _ in range(LEAVES_AFTER if not read else LEAVES_AFTER // 2):
            step(rig)
        leave(rig, attempt)
        assert rig.usage(attempt).cached_tokens == read
        read += rig.usage(attempt).computed_tokens
    assert read == (LEAVES_AFTER + LEAVES_AFTER // 2) * CHUNK
    rig.serve(request("third", body))
    assert rig.usage("third").cached_tokens == read
    assert rig.finish_of("third") == rig.finish_of("stays") == "length"
    rig.settle()


@slots
def test_one_who_leaves_the_queue_never_starts_and_takes_nobody_along(slots: int) -> None:
    rig = beside_one_that_decodes(slots, 2 * CHUNKS)
    rig.submit(request("reads", tokens(CHUNKS * CHUNK)))
    for name in ("waits", "behind"):
        rig.submit(request(name, tokens(200, ord(name[0]))))
    for _ in range(LEAVES_AFTER):
        step(rig)
    leave(rig, "waits")
    assert [rig.requests[name].state for name in ("reads", "behind")] == [State.RUNNING, State.WAITING]
    rig.run()
    assert "waits" not in rig.runner.prompt_tokens_run
    assert [rig.finish_of(name) for name in ("stays", "reads", "behind")] == ["length"] * 3
    assert rig.usage("reads").computed_tokens == CHUNKS * CHUNK
    rig.settle()


def _asked(rig: Rig) -> bool:
    return bool(rig.store.calls)


def _loading(rig: Rig) -> bool:
    while rig.store.calls:
        rig.store.answer()
    return any(transfer.kind == "load" for transfer in rig.runner.under_way)


@slots
@pytest.mark.parametrize("moment", [_asked, _loading])
def test_leaving_amid_a_restore(moment: Callable[[Rig], bool], slots: int) -> None:
    body = tokens(5 * CHUNK)
    rig = beside_one_that_decodes(slots, 90, kv=True)
    rig.submit(request("before", body, max_tokens=1))
    while "before" not in rig.final:
        rig.step()
    for _ in range(10):  # enough for all of it to be written through
        step(rig)
    assert not rig.scheduler.transfers_under_way
    push_out(rig)
    rig.store.automatic = False
    rig.runner.fate = lambda transfer: "wait"
    rig.submit(request("leaves", body))
    step(rig)
    while not moment(rig):
        step(rig)
    assert rig.requests["leaves"].state is State.WAITING_FOR_KV
    leave(rig, "leaves")
    assert "leaves" not in rig.runner.prompt_tokens_run
    rig.runner.fate = lambda transfer: "done"
    while rig.store.calls:
        rig.store.answer()
    rig.store.automatic = True
    rig.serve(request("again", body))
    assert rig.usage("again").cached_tokens >= 4 * CHUNK
    if moment is _asked:
        assert rig.usage("again").cached_device <= rig.usage("again").cached_host
    assert rig.finish_of("stays") == rig.finish_of("again") == "length"
    rig.settle()
