"""Restores and write-through, seen through the scheduler: the rig checks pages, leases and tokens at each step."""

import random

import pytest

from services.engine.batch import Transfer
from services.engine.cache.recompute_cost import RecomputeCost
from services.engine.request import State
from services.protocol.hashing import BLOCK_TOKENS
from tests.engine.rig import Rig, request
from tests.fakes import Fate, LeaseCall, ReserveCall, continuation


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(251) for _ in range(count)]


def stored_and_evicted(rig: Rig, prompt: list[int]) -> None:
    """Have a prompt's blocks in the store and not on the device."""
    rig.serve(request("first", prompt, max_tokens=1))
    rig.serve(request("filler", tokens(rig.pages * BLOCK_TOKENS - 1, seed=77), max_tokens=1))
    assert len(rig.store.committed) >= len(prompt) // BLOCK_TOKENS


def answer_all(rig: Rig) -> None:
    while rig.store.calls:
        rig.store.answer()


def state_of(rig: Rig, name: str) -> State:
    return rig.requests[name].state


def test_every_full_block_is_written_through_once() -> None:
    rig = Rig(kv=True)
    rig.serve(request("a", tokens(200), max_tokens=70))
    assert len(rig.store.committed) == 4  # the 270th token is never computed
    assert rig.store.committed == rig.on_device
    rig.serve(request("b", tokens(200), max_tokens=70))
    assert len(rig.store.committed) == 4
    assert sum(result.stats.stored_blocks for result in rig.results) == 4
    rig.settle()


def test_conversations_revisited_in_reverse_come_from_the_store() -> None:
    rig = Rig(pages=16, max_batch_tokens=512, kv=True)
    prompts = [tokens(512, seed) for seed in range(12)]
    for index, prompt in enumerate(prompts):
        rig.serve(request(f"cold{index}", prompt, max_tokens=8))
    for index, prompt in reversed(list(enumerate(prompts))):
        rig.serve(request(f"warm{index}", prompt, max_tokens=8))
        usage = rig.usage(f"warm{index}")
        assert usage.cached_tokens == 511
        assert usage.computed_tokens == 1
        assert rig.told[f"warm{index}"] == rig.told[f"cold{index}"]
    assert sum(rig.usage(f"warm{index}").cached_host for index in range(12)) >= 10 * 511
    rig.settle()


def test_a_lookup_holds_up_nobody_else() -> None:
    rig = Rig(pages=8, kv=True)
    stored_and_evicted(rig, tokens(128))
    rig.store.automatic = False
    rig.submit(request("restored", tokens(130), max_tokens=2))
    rig.submit(request("short", tokens(10, 5), max_tokens=2))
    rig.run()
    assert state_of(rig, "restored") is State.WAITING_FOR_KV
    assert rig.finish_of("short") == "length"
    answer_all(rig)
    rig.run()
    usage = rig.usage("restored")
    assert (usage.cached_device, usage.cached_host, usage.computed_tokens) == (0, 128, 2)
    assert 0 < usage.restore_seconds <= usage.queue_seconds
    rig.settle()


def test_what_the_device_has_is_not_loaded() -> None:
    rig = Rig(pages=8, kv=True)
    stored_and_evicted(rig, tokens(256))
    rig.serve(request("half", tokens(128), max_tokens=1))
    rig.serve(request("whole", tokens(256), max_tokens=1))
    usage = rig.usage("whole")
    assert (usage.cached_device, usage.cached_host, usage.computed_tokens) == (128, 127, 1)
    rig.settle()


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_failed_load_is_a_miss_of_the_block_and_what_follows(failing: int) -> None:
    rig = Rig(pages=8, kv=True)
    stored_and_evicted(rig, tokens(256))
    loads: list[int] = []

    def fate(transfer: Transfer) -> Fate:
        if transfer.kind == "load":
            loads.append(transfer.id)
            return "failed" if len(loads) == failing + 1 else "done"
        return "done"

    rig.runner.fate = fate
    rig.serve(request("again", tokens(256), max_tokens=3))
    assert len(loads) == 4
    assert rig.usage("again").cached_host == failing * BLOCK_TOKENS
    rig.settle()


def test_a_failed_store_gives_its_room_back() -> None:
    rig = Rig(pages=8, kv=True)
    rig.runner.fate = lambda transfer: "failed"
    rig.serve(request("a", tokens(256), max_tokens=1))
    assert rig.store.objects == {}
    rig.settle()


def test_a_full_store_is_no_trouble() -> None:
    rig = Rig(pages=8, kv=True, kv_capacity=2)
    rig.serve(request("a", tokens(256), max_tokens=3))
    assert len(rig.store.committed) == 2
    assert rig.store.refused == 2
    rig.settle()


def test_without_a_store_nothing_is_asked() -> None:
    rig = Rig(pages=8, kv=True)
    rig.store.disconnect()
    asked: list[int] = []
    rig.store.reserve = lambda tag, entries, trace="": asked.append(tag)  # type: ignore[method-assign]
    rig.store.lease = lambda tag, keys, trace="": asked.append(tag)  # type: ignore[method-assign]
    rig.serve(request("a", tokens(300), max_tokens=3))
    assert asked == []
    rig.settle()


def test_a_restarted_store_is_given_what_the_device_has_parents_first() -> None:
    rig = Rig(pages=16, kv=True)
    rig.serve(request("a", tokens(300), max_tokens=3))
    rig.serve(request("b", tokens(300, 1), max_tokens=3))
    rig.store.disconnect()
    assert rig.store.committed == set()
    order: list[bytes] = []
    reserve = rig.store.reserve

    def watch(tag: int, entries: list, trace: str = "") -> None:
        order.extend(entry.key for entry in entries)
        for entry in entries:
            assert entry.parent == b"" or entry.parent in order
        reserve(tag, entries, trace)

    rig.store.reserve = watch  # type: ignore[method-assign, assignment]
    rig.store.connect()
    rig.run()
    assert rig.store.committed == rig.on_device
    assert len(order) == 8
    rig.settle()


@pytest.mark.parametrize("moment", ["asked", "reserved", "copying"])
def test_a_store_that_restarts_amid_a_write_gets_the_block_again(moment: str) -> None:
    rig = Rig(pages=8, kv=True, kv_automatic=False)
    rig.runner.fate = lambda transfer: "wait" if moment == "copying" else "done"
    rig.submit(request("a", tokens(100), max_tokens=1))
    while not any(isinstance(call, ReserveCall) for call in rig.store.calls):
        rig.step()
        if rig.store.calls and isinstance(rig.store.calls[0], LeaseCall):
            rig.store.answer()
    if moment != "asked":
        answer_all(rig)
    if moment == "copying":
        while not rig.scheduler.transfers_under_way:
            rig.step()
    rig.store.disconnect()
    rig.store.connect()
    rig.store.automatic = True
    rig.step()
    rig.runner.fate = lambda transfer: "done"
    rig.run()
    assert len(rig.store.committed) == 1
    rig.settle()


def test_a_connection_lost_amid_a_load_makes_it_a_miss() -> None:
    rig = Rig(pages=8, kv=True)
    stored_and_evicted(rig, tokens(256))
    rig.runner.fate = lambda transfer: "wait"
    rig.submit(request("again", tokens(256), max_tokens=2))
    while not rig.scheduler.transfers_under_way:
        rig.step()
    rig.store.disconnect()  # the fake overwrites the arena
    rig.runner.fate = lambda transfer: "done"
    rig.run()
    assert rig.usage("again").cached_tokens == 0
    assert rig.told["again"] == continuation(tokens(256), 2)
    rig.settle()


def test_an_answer_of_a_lost_connection_starts_no_copy() -> None:
    rig = Rig(pages=8, kv=True)
    stored_and_evicted(rig, tokens(256))
    rig.serve(request("new", tokens(100, 5), max_tokens=1))
    rig.store.automatic = False
    rig.submit(request("again", tokens(256), max_tokens=2))
    rig.submit(request("more", tokens(100, 6), max_tokens=2))
    for _ in range(4):
        rig.step()
        if isinstance(rig.store.calls[-1], LeaseCall) and len(rig.store.calls[-1].keys) == 1:
            rig.store.answer(-1)
    assert {type(call) for call in rig.store.calls} == {LeaseCall, ReserveCall}
    answer_all(rig)  # into the inbox, where the core finds them after the connection is lost
    rig.store.disconnect()
    rig.run()  # the rig checks every copy that begins
    assert rig.usage("again").cached_tokens == 0
    rig.settle()


def test_cancel_while_the_store_is_asked() -> None:
    rig = Rig(pages=8, kv=True)
    stored_and_evicted(rig, tokens(256))
    rig.serve(request("half", tokens(128), max_tokens=1))
    rig.store.automatic = False
    rig.submit(request("gone", tokens(256), max_tokens=2))
    rig.step()
    assert state_of(rig, "gone") is State.WAITING_FOR_KV
    rig.cancel("gone")
    rig.step()
    assert rig.finish_of("gone") == "cancel"
    assert rig.load.pages_free == 8, "nothing is on its way, so nothing needs to be held"
    answer_all(rig)
    rig.run()
    assert rig.store.leases == {}
    rig.settle()


def test_cancel_amid_a_load_holds_pages_until_the_copies_are_back() -> None:
    rig = Rig(pages=8, kv=True)
    stored_and_evicted(rig, tokens(256))
    rig.runner.fate = lambda transfer: "wait"
    rig.submit(request("gone", tokens(256), max_tokens=2))
    while not rig.scheduler.transfers_under_way:
        rig.step()
    rig.cancel("gone")
    rig.step()
    assert rig.finish_of("gone") == "cancel"
    assert rig.load.pages_free == 4
    assert len(rig.store.leases) == 1
    rig.submit(request("next", tokens(4 * BLOCK_TOKENS - 3, 9), max_tokens=2))
    for _ in range(10):
        rig.step()
    assert rig.finish_of("next") == "length"
    rig.runner.fate = lambda transfer: "done"
    rig.run()
    assert rig.store.leases == {}
    loaded = sum(result.stats.loaded_blocks for result in rig.results)
    rig.serve(request("again", tokens(256), max_tokens=2))
    assert rig.usage("again").cached_device == 255, "what was loaded for the cancelled one is kept"
    assert sum(result.stats.loaded_blocks for result in rig.results) == loaded
    rig.settle()


def test_cancel_when_the_copies_are_just_back() -> None:
    rig = Rig(pages=8, kv=True)
    stored_and_evicted(rig, tokens(256))
    rig.submit(request("gone", tokens(256), max_tokens=2))
    while not any(result.stats.loaded_blocks for result in rig.results):
        rig.step()
    assert state_of(rig, "gone") is State.WAITING_FOR_KV
    rig.cancel("gone")
    rig.step()
    assert rig.load.pages_free == 8
    rig.settle()


def test_cancel_in_one_breath_with_the_answer() -> None:
    rig = Rig(pages=8, kv=True, kv_automatic=False)
    rig.serve(request("short", tokens(60), max_tokens=10))  # its block is on the device only
    answer_all(rig)
    rig.run()
    rig.submit(request("gone", [*tokens(60), *rig.told["short"], *tokens(200, 1)], max_tokens=2))
    rig.step()
    assert state_of(rig, "gone") is State.WAITING_FOR_KV
    answer_all(rig)
    rig.cancel("gone")
    rig.run()
    assert rig.finish_of("gone") == "cancel"
    rig.settle()


def test_a_shared_prefix_is_loaded_once() -> None:
    rig = Rig(pages=16, kv=True)
    stored_and_evicted(rig, tokens(256))
    for index in range(5):
        rig.submit(request(f"r{index}", [*tokens(256), index], max_tokens=2))
    rig.run()
    assert sum(result.stats.loaded_blocks for result in rig.results) == 4
    usages = [rig.usage(f"r{index}") for index in range(5)]
    assert [usage.cached_host for usage in usages] == [256, 0, 0, 0, 0]
    assert [usage.cached_tokens for usage in usages] == [256] * 5
    rig.settle()


def test_restores_that_together_need_more_than_the_pool_take_turns() -> None:
    rig = Rig(pages=8, kv=True)
    prompts = [tokens(64 * 6, seed) for seed in range(4)]
    for index, prompt in enumerate(prompts):
        rig.serve(request(f"cold{index}", prompt, max_tokens=4))
    for index, prompt in enumerate(prompts):
        rig.submit(request(f"warm{index}", prompt, max_tokens=40))
    rig.run()
    for index in range(4):
        assert rig.usage(f"warm{index}").cached_tokens == 64 * 6 - 1
    rig.settle()


def test_when_the_pages_went_meanwhile_the_restore_is_asked_for_again() -> None:
    rig = Rig(pages=8, kv=True)
    stored_and_evicted(rig, tokens(64 * 4))
    rig.serve(request("half", tokens(64 * 2), max_tokens=1))
    rig.submit(request("grows", tokens(64 * 3 - 2, 9), max_tokens=100))
    rig.step()
    rig.store.automatic = False
    rig.submit(request("restored", tokens(64 * 4), max_tokens=2))
    rig.step()
    assert state_of(rig, "restored") is State.WAITING_FOR_KV
    for _ in range(90):
        rig.step()
        for index, call in reversed(list(enumerate(rig.store.calls))):
            if isinstance(call, ReserveCall):
                rig.store.answer(index)
    assert rig.load.pages_free < 2
    answer_all(rig)
    rig.step()
    assert state_of(rig, "restored") is State.WAITING
    rig.store.automatic = True
    rig.run()
    assert rig.usage("restored").cached_tokens == 64 * 4 - 1
    assert rig.usage("restored").preemptions == 0
    rig.settle()


def test_a_preempted_request_comes_back_from_the_store() -> None:
    rig = Rig(pages=8, kv=True)
    rig.submit(request("old", tokens(120), max_tokens=330))
    rig.submit(request("young", tokens(120, 1), max_tokens=200))
    rig.run()
    usage = rig.usage("young")
    assert usage.preemptions >= 1
    assert usage.computed_tokens < 2 * 120, "its full blocks were not computed again"
    rig.settle()


def test_stores_leave_half_of_a_small_pool_alone() -> None:
    rig = Rig(pages=8, kv=True, kv_automatic=False)
    rig.submit(request("a", tokens(64 * 6), max_tokens=1))
    while rig.step():
        if rig.store.calls and isinstance(rig.store.calls[0], LeaseCall):
            rig.store.answer()
    assert rig.finish_of("a") == "length"
    reserved = [entry for call in rig.store.calls if isinstance(call, ReserveCall) for entry in call.entries]
    assert len(reserved) == 4
    assert rig.load.pages_free == 4
    rig.settle()
    assert len(rig.store.committed) == 6


def test_the_store_is_told_what_a_block_costs() -> None:
    rig = Rig(pages=8, kv=True, kv_automatic=False)
    rig.store.disconnect()
    rig.runner.expect("slow", tokens(128))
    rig.scheduler.submit(request("slow", tokens(128), max_tokens=1))
    batch = rig.scheduler.schedule()
    assert batch is not None
    rig.scheduler.update(rig.runner.run(batch), seconds=64.0)
    rig.store.connect()
    rig.core.handle(rig.inbox.get())
    rig.scheduler.schedule()
    (call,) = rig.store.calls
    assert isinstance(call, ReserveCall)
    costs = [entry.cost for entry in call.entries]
    assert costs == [pytest.approx(32, rel=0.01), pytest.approx(32, rel=0.01)]
    assert costs[0] < costs[1]


def test_deeper_blocks_cost_more_to_compute_again() -> None:
    cost = RecomputeCost()
    cost.observe([(0, 512)], 1.0)
    first = cost.of(0)
    assert first == pytest.approx(64 / 512, rel=0.02)
    assert cost.of(0) < cost.of(1) < cost.of(4000)
    for _ in range(100):
        cost.observe([(0, 512)], 2.0)
    assert cost.of(0) == pytest.approx(2 * first, rel=0.01)
    cost.observe([], 5.0)
    cost.observe([(0, 10)], 0.0)
    assert cost.of(0) == pytest.approx(2 * first, rel=0.01)
