"""Checkpoints of recurrent states, seen through the scheduler.

The fake device folds each request's tokens into its slot and samples from there, so that a state of another position,
or of another request, cannot give the tokens of a cold run; the rig compares them for every request.
"""

import random
from collections.abc import Callable

import pytest

from services.engine.batch import ModelOutput, Row, Sampled, Transfer
from services.engine.request import State
from services.engine.step_plan import StepPlan
from services.protocol.hashing import BLOCK_TOKENS, root
from services.protocol.hashing import chain as names_of
from services.protocol.kv import Entry, Key
from tests.engine.preempting import preempt
from tests.engine.rig import FINGERPRINT, Rig, request
from tests.fakes import Fate, FindCall, LeaseCall, ReserveCall, continuation


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(251) for _ in range(count)]


def state_of(rig: Rig, name: str) -> State:
    return rig.requests[name].state


def state_keys(rig: Rig) -> set[Key]:
    return {key for key in rig.store.committed if b"/state/" in key}


def positions(rig: Rig) -> list[int]:
    """Of the checkpoints on the device."""
    return [checkpoint.mark.position for checkpoint in rig.scheduler._checkpoints.all()]


def push_out(rig: Rig, blocks: bool = True) -> None:
    """Have nothing on the device any more; what is in the store stays, and what was known of it too."""
    checkpoints, pool = rig.scheduler._checkpoints, rig.scheduler._pool
    slots = [checkpoints.take() for _ in range(checkpoints.available)]
    for slot in slots:
        assert slot is not None
        checkpoints.give_back(slot)
    if blocks:
        pool.release(pool.allocate(pool.available))
    assert positions(rig) == []


def restarted(rig: Rig, slots: int, pages: int, interval: int) -> Rig:
    """Another engine with the same store, which kept what it had."""
    other = Rig(kv=True, slots=slots, pages=pages, interval=interval)
    other.step()
    old = rig.store
    other.store.arena, other.store.objects, other.store._free = old.arena, old.objects, old._free
    return other


# From checkpoints on the device.


def test_an_exact_repeat_computes_nothing() -> None:
    rig = Rig(slots=8)
    rig.serve(request("a", tokens(300), max_tokens=5))
    rig.runner.keep_batches = True
    rig.serve(request("b", tokens(300), max_tokens=5))
    first = rig.runner.batches[0]
    (row,) = first.rows
    assert (row.start, list(row.tokens), row.write_from) == (300, [], 300)
    assert {copy.kind for copy in first.before} == {"state", "page"}
    usage = rig.usage("b")
    assert (usage.cached_device, usage.cached_host, usage.computed_tokens) == (300, 0, 0)
    rig.settle()


def test_chunks_end_at_hints_and_leave_checkpoints() -> None:
    rig = Rig(slots=8, max_batch_tokens=1024)
    rig.runner.keep_batches = True
    rig.serve(request("a", tokens(400), max_tokens=1, hints=(90, 256, 392)))
    ends = [row.start + len(row.tokens) for batch in rig.runner.batches for row in batch.rows]
    assert ends == [90, 256, 392, 400]
    assert [len(batch.after) for batch in rig.runner.batches] == [2, 1, 2, 2], "no tail at a block's border"
    assert positions(rig) == [90, 256, 392, 400]
    for length in (90, 256, 392):
        name = f"to{length}"
        rig.serve(request(name, [*tokens(length), 1, 2, 3], max_tokens=2))
        assert rig.usage(name).cached_device == length
        assert rig.usage(name).computed_tokens == 3
    rig.settle()


def test_of_two_hits_of_blocks_only_that_with_a_state_counts() -> None:
    rig = Rig(slots=8)
    rig.serve(request("a", tokens(400), max_tokens=1, hints=(130,)))
    rig.serve(request("b", [*tokens(320), 5, 6], max_tokens=1))
    assert rig.usage("b").cached_device == 130
    assert rig.usage("b").computed_tokens == 322 - 130
    rig.settle()


def test_a_chat_that_only_grows_finds_prompt_and_answer() -> None:
    rig = Rig(slots=8, pages=64)
    context, known = tokens(100), 0
    for turn in range(8):
        rig.serve(request(f"t{turn}", context, max_tokens=70))
        assert rig.usage(f"t{turn}").cached_device == known, "all but the last token, which was not run"
        known = len(context) + 70 - 1
        context = context + rig.told[f"t{turn}"] + tokens(30, seed=turn)
    rig.settle()


def test_a_chat_whose_template_drops_the_thinking_goes_on_before_the_suffix() -> None:
    rig = Rig(slots=8, pages=64)
    think, history = [250, 249], tokens(200)
    hints: tuple[int, ...] = (120,)
    known = 0
    for turn in range(8):
        hints = (*hints, len(history))
        rig.serve(request(f"t{turn}", history + think, max_tokens=90, hints=hints))
        assert rig.usage(f"t{turn}").cached_device == known
        known = len(history)
        history = history + tokens(80, seed=turn)  # the answer without its thinking, and the next question
    rig.settle()


@pytest.mark.parametrize("kv", [False, True])
def test_a_short_chat_goes_on_there_as_well(kv: bool) -> None:
    """However little it saves: there is nothing deeper. But the store is not given what nobody would ask it for."""
    rig = Rig(slots=8, pages=64, kv=kv)
    think, history = [250, 249, 248, 247], tokens(10)
    hints: tuple[int, ...] = (6,)
    known = 0
    for turn in range(4):
        hints = (*hints, len(history))
        rig.serve(request(f"t{turn}", history + think, max_tokens=3, hints=hints))
        assert rig.usage(f"t{turn}").cached_device == known
        known = len(history)
        history = history + tokens(8, seed=turn)
    assert positions(rig) == [10, 18, 26, 34]
    assert not state_keys(rig)
    rig.settle()


def test_forty_agents_read_their_system_prompt_once() -> None:
    for budget in (128, 4096):
        rig = Rig(pages=300, max_batch_tokens=budget, max_running=40, slots=60)
        shared = tokens(650)
        agents = [request(f"agent{i}", shared + tokens(20, seed=i), max_tokens=2, hints=(650,)) for i in range(40)]
        rig.serve(*agents)
        assert sum(rig.runner.prompt_tokens_run.values()) == 650 + 40 * 20
        assert sum(rig.usage(f"agent{i}").cached_device == 650 for i in range(40)) == 39
        rig.settle()


def test_identical_prompts_at_once_are_read_once() -> None:
    rig = Rig(pages=64, slots=20, max_batch_tokens=1024)
    rig.serve(*(request(f"r{i}", tokens(333), max_tokens=70) for i in range(6)))
    assert sum(rig.usage(f"r{i}").computed_tokens for i in range(6)) == 333
    rig.settle()


@pytest.mark.parametrize("moment", ["prefill", "decode"])
def test_an_abort_leaves_all_that_was_run(moment: str) -> None:
    rig = Rig(slots=8, pages=64, max_batch_tokens=128)
    rig.submit(request("gone", tokens(1000), max_tokens=100))
    while rig.runner.prompt_tokens_run.get("gone", 0) < 500:
        rig.step()
    while moment == "decode" and len(rig.told["gone"]) < 50:
        rig.step()
    ran = rig.scheduler._active["gone"].computed
    rig.cancel("gone")
    rig.run()
    prompt = tokens(1000) if moment == "prefill" else tokens(1000) + rig.told["gone"]
    rig.serve(request("again", prompt, max_tokens=2))
    assert rig.usage("again").cached_device == ran
    assert ran >= (512 if moment == "prefill" else 1000 + 49)
    rig.settle()


def test_an_abort_before_anything_ran_leaves_nothing() -> None:
    rig = Rig(slots=2, max_running=2, max_batch_tokens=64)
    rig.submit(request("first", tokens(640), max_tokens=1))
    rig.submit(request("gone", tokens(640, 1), max_tokens=1))
    rig.step()
    rig.cancel("gone")
    rig.step()
    assert positions(rig) == []
    rig.run()
    rig.settle()


def test_a_long_prefill_leaves_a_ladder() -> None:
    rig = Rig(slots=16, pages=64, interval=512)
    rig.serve(request("a", tokens(1800), max_tokens=1))
    assert positions(rig) == [512, 1024, 1536, 1800]
    rig.serve(request("b", [*tokens(1300), 1], max_tokens=1))
    assert rig.usage("b").cached_device == 1024
    rig.settle()


def test_a_long_answer_leaves_a_ladder() -> None:
    rig = Rig(slots=16, pages=64, interval=128)
    rig.serve(request("a", tokens(100), max_tokens=300))
    assert positions(rig) == [100, 128, 256, 384, 399]
    rig.serve(request("b", [*tokens(100), *rig.told["a"][:200], 1], max_tokens=1))
    assert rig.usage("b").cached_device == 256
    rig.settle()


def test_a_preempted_request_goes_on_where_it_was() -> None:
    """Of the pages that it leaves only blocks of somebody else are taken."""
    rig = Rig(slots=8, pages=12, max_running=2)
    rig.serve(request("long ago", tokens(60, 9), max_tokens=1))
    rig.submit(request("old", tokens(300), max_tokens=4))
    rig.submit(request("young", tokens(300, 1), max_tokens=100))
    while len(rig.told["young"]) < 2:
        rig.step()
    sequence = rig.scheduler._active["young"]
    ran = sequence.computed
    preempt(rig.scheduler, sequence)
    assert sequence.state == -1
    assert sequence.request.state is State.WAITING
    rig.runner.keep_batches = True
    rig.step()
    rows = {row.request_id: row for row in rig.runner.batches[0].rows}
    assert (rows["young"].start, len(rows["young"].tokens)) == (ran, 1)
    rig.run()
    assert rig.usage("young").preemptions == 1
    assert rig.usage("young").computed_tokens == 300
    rig.settle()


def test_when_pages_run_out_the_youngest_gives_way_and_resumes_at_a_checkpoint() -> None:
    rig = Rig(slots=8, pages=8)
    prompts = {name: tokens(120, seed) for seed, name in enumerate(("old", "young"))}
    rig.serve(*(request(name, prompt, max_tokens=300) for name, prompt in prompts.items()))
    assert rig.usage("old").preemptions == 0
    assert rig.usage("young").preemptions >= 1
    for name, prompt in prompts.items():
        assert rig.told[name] == continuation(prompt, 300)
    rig.settle()


@pytest.mark.parametrize("slots", [1, 2])
def test_few_slots_are_enough(slots: int) -> None:
    """With one slot a request can but take a checkpoint over, and only while nobody else needs it."""
    rig = Rig(slots=slots, pages=16, max_running=4)
    rig.serve(request("a", tokens(200), max_tokens=3))
    rig.serve(request("b", tokens(200) + rig.told["a"], max_tokens=3))
    assert rig.usage("b").cached_device == 202
    rig.serve(*(request(f"r{i}", tokens(200, i), max_tokens=20) for i in range(5)))
    rig.settle()


def test_no_slot_is_no_room() -> None:
    rig = Rig(slots=2, pages=32, max_running=4)
    for index in range(4):
        rig.submit(request(f"r{index}", tokens(100, index), max_tokens=30))
    rig.step()
    assert (rig.load.running, rig.load.waiting) == (2, 2)
    rig.run()
    rig.settle()


def test_a_pool_without_a_page_for_a_copy_gives_the_checkpoints_own() -> None:
    rig = Rig(slots=4, pages=3)
    rig.serve(request("a", tokens(150), max_tokens=1))
    assert rig.load.pages_free == 3
    rig.serve(request("b", tokens(150), max_tokens=20))
    assert rig.usage("b").cached_device == 150
    rig.settle()


def test_one_that_is_preempted_as_it_begins_holds_nothing() -> None:
    rig = Rig(slots=6, pages=5)
    rig.serve(request("a", tokens(70), max_tokens=1))
    rig.submit(request("old", tokens(120, 1), max_tokens=60))
    while rig.scheduler._active.get("old") is None or rig.scheduler._active["old"].computed < 128:
        rig.step()
    rig.submit(request("young", [*tokens(70), 3], max_tokens=4))
    rig.step()  # its copy takes the page that is promised to the old one, while that of the source is pinned
    assert state_of(rig, "young") is State.WAITING
    rig.run()
    assert rig.usage("young").preemptions == 1
    assert rig.usage("old").preemptions == 0
    rig.settle()


def test_what_a_preempted_one_leaves_is_not_taken_by_one_that_has_no_state_yet() -> None:
    rig = Rig(slots=8, pages=32, kv=True)
    rig.serve(request("a", tokens(200), max_tokens=1))
    rig.store.automatic = False
    rig.submit(request("begins", tokens(200) + continuation(tokens(200), 30), max_tokens=4))
    rig.submit(request("gives way", tokens(200), max_tokens=40))
    while len(rig.told["gives way"]) < 20:
        rig.step()
    assert state_of(rig, "begins") is State.WAITING_FOR_KV
    plan_decodes = rig.scheduler._planner._plan_decodes

    def preempt_first(plan: StepPlan, now: float) -> None:
        """As an older one would that needs a page."""
        rig.scheduler._planner._plan_decodes = plan_decodes  # type: ignore[method-assign]
        assert state_of(rig, "begins") is State.RUNNING
        preempt(rig.scheduler, rig.scheduler._active["gives way"])
        plan_decodes(plan, now)

    rig.scheduler._planner._plan_decodes = preempt_first  # type: ignore[method-assign]
    while rig.store.calls:
        rig.store.answer()
    rig.step()
    assert rig.scheduler._planner._plan_decodes == plan_decodes
    rig.run()
    assert rig.usage("begins").cached_device == 208, "what it left behind itself; not the state that it had"
    rig.settle()


def test_a_checkpoint_that_lost_its_tail_is_taken_again() -> None:
    rig = Rig(slots=4, pages=8)
    rig.serve(request("a", tokens(150), max_tokens=1))
    pool = rig.scheduler._pool
    pool.release(pool.allocate(pool.available - 2))  # the tail goes first
    rig.serve(request("b", tokens(150), max_tokens=20))
    assert rig.usage("b").cached_device == 0
    rig.serve(request("c", tokens(150), max_tokens=1))
    assert rig.usage("c").cached_device == 150
    rig.settle()


def test_a_row_without_distribution_leaves_no_checkpoint() -> None:
    rig = Rig(slots=4)
    rig.runner.expect("bad", tokens(100))
    rig.scheduler.submit(request("bad", tokens(100), max_tokens=3))
    batch = rig.scheduler.schedule()
    assert batch is not None
    assert len(batch.after) == 2
    rig.runner.run(batch)
    rig.scheduler.update(ModelOutput(batch.step, {"bad": Sampled((), finish="error")}), 0.01)
    rig.scheduler.check_integrity()
    assert positions(rig) == []
    assert rig.scheduler.idle


def test_nothing_is_found_before_its_step_is_done() -> None:
    rig = Rig(slots=8)
    rig.scheduler.submit(request("a", tokens(100), max_tokens=3))
    rig.runner.expect("a", tokens(100))
    batch = rig.scheduler.schedule()
    assert batch is not None
    assert batch.after
    assert positions(rig) == []
    rig.scheduler.update(rig.runner.run(batch), 0.01)
    assert positions(rig) == [100]


def test_when_the_device_is_lost_amid_a_step_all_slots_come_back() -> None:
    rig = Rig(slots=4)
    rig.serve(request("a", tokens(100), max_tokens=1))
    rig.scheduler.submit(request("b", [*tokens(100), *tokens(100, 2)], max_tokens=3))
    batch = rig.scheduler.schedule()
    assert batch is not None
    assert batch.before
    assert batch.after
    rig.scheduler.fail("gone")
    assert rig.scheduler.idle
    rig.scheduler.check_integrity()


def test_salts_share_no_state() -> None:
    rig = Rig(slots=8)
    rig.serve(request("a", tokens(30), salt="one"))
    rig.serve(request("b", tokens(100), salt="one"))
    rig.serve(request("c", tokens(100), salt="two"))
    assert rig.usage("c").cached_tokens == 0
    rig.settle()


def test_a_session_leaves_its_old_turns_before_another_ones_last() -> None:
    rig = Rig(slots=8, pages=200)
    rig.serve(request("other", tokens(200, 77), max_tokens=2))
    context = tokens(200)
    for turn in range(10):
        rig.serve(request(f"t{turn}", context, max_tokens=70, hints=(70, len(context) - 3)))
        context = context + rig.told[f"t{turn}"] + tokens(100, seed=turn)
    rig.serve(request("other again", tokens(200, 77) + rig.told["other"], max_tokens=2))
    assert rig.usage("other again").cached_device >= 200
    rig.serve(request("new session", tokens(70) + tokens(50, 5), max_tokens=2))
    assert rig.usage("new session").cached_device == 70, "where sessions part is never superseded"
    rig.settle()


# From the kvstore.


def warm(rig: Rig, name: str, prompt: list[int], hints: tuple[int, ...] = (), most: int = 2) -> tuple[int, int, int]:
    """What a request found on the device, in the store, and computed."""
    rig.serve(request(name, prompt, max_tokens=most, hints=hints))
    usage = rig.usage(name)
    return usage.cached_device, usage.cached_host, usage.computed_tokens


def test_checkpoints_are_written_through_behind_their_blocks() -> None:
    rig = Rig(slots=16, kv=True)
    rig.scheduler._cost.observe = lambda *_: None  # type: ignore[method-assign]  # not how busy this machine is
    entries: list[Entry] = []
    reserve = rig.store.reserve

    def watch(tag: int, asked: list[Entry], trace: str = "") -> None:
        entries.extend(asked)
        reserve(tag, asked, trace)

    rig.store.reserve = watch  # type: ignore[method-assign, assignment]
    rig.serve(request("a", tokens(300), max_tokens=2, hints=(10, 128, 290)))
    states = [entry for entry in entries if b"/state/" in entry.key]
    assert [int.from_bytes(entry.key[-8:], "little") for entry in states] == [128, 290, 300, 301]
    order = [entry.key for entry in entries]
    for entry in states:
        assert order.index(entry.parent) < order.index(entry.key)
    costs = {entry.key[-8]: entry.cost for entry in states}
    assert costs[128] > costs[290 % 256] / 2
    assert max(entry.cost for entry in states) > 10 * states[-1].cost, "the last one saves a single token"
    assert len(state_keys(rig)) == 4
    rig.serve(request("b", tokens(300), max_tokens=2))
    assert len(state_keys(rig)) == 4, "each once"
    rig.settle()


def test_block_and_state_come_back_together() -> None:
    rig = Rig(slots=16, kv=True)
    rig.serve(request("a", tokens(300), max_tokens=2))
    push_out(rig)
    assert warm(rig, "b", tokens(300)) == (0, 300, 0)
    assert warm(rig, "c", tokens(300)) == (300, 0, 0), "it stayed"
    rig.settle()


def test_a_state_alone_comes_back() -> None:
    rig = Rig(slots=16, kv=True)
    rig.serve(request("a", tokens(300), max_tokens=2))
    push_out(rig, blocks=False)
    assert warm(rig, "b", tokens(300)) == (256, 44, 0), "only the partial block came"
    assert sum(result.stats.loaded_blocks for result in rig.results) == 0
    rig.settle()


def test_blocks_without_a_state_are_not_loaded_nor_reported() -> None:
    rig = Rig(slots=16, kv=True)
    rig.serve(request("a", tokens(300), max_tokens=2))
    push_out(rig)
    for key in state_keys(rig):
        rig.store.forget(key)
    assert warm(rig, "b", tokens(300)) == (0, 0, 300)
    assert sum(result.stats.loaded_blocks for result in rig.results) == 0
    rig.settle()


def test_a_state_without_all_its_blocks_is_not_loaded() -> None:
    rig = Rig(slots=16, kv=True)
    rig.serve(request("a", tokens(400), max_tokens=2, hints=(70, 200)))
    push_out(rig)
    names = sorted(rig.store.committed - state_keys(rig))
    for key in names:
        rig.store.forget(key)
    assert warm(rig, "b", tokens(400)) == (0, 0, 400)
    rig.settle()


def test_the_deepest_position_that_both_have_is_restored() -> None:
    rig = Rig(slots=16, kv=True)
    rig.serve(request("a", tokens(400), max_tokens=2, hints=(70, 200)))
    push_out(rig)
    for key in state_keys(rig):
        if int.from_bytes(key[-8:], "little") >= 400:
            rig.store.forget(key)
    assert warm(rig, "b", tokens(400), hints=(70, 200)) == (0, 200, 200)
    rig.settle()


def test_states_deeper_than_the_blocks_are_passed_over() -> None:
    rig = Rig(slots=16, kv=True)
    rig.serve(request("a", tokens(400), max_tokens=2, hints=(70, 200)))
    push_out(rig)
    chain = list(names_of(root(FINGERPRINT), tokens(400)))
    rig.store.forget(chain[4])
    assert warm(rig, "b", tokens(400), hints=(70, 200)) == (0, 200, 200)
    rig.settle()


def test_a_request_without_a_slot_does_not_ask_the_store() -> None:
    rig = Rig(slots=1, kv=True, kv_automatic=False)
    rig.submit(request("a", tokens(300), max_tokens=2))
    rig.submit(request("b", tokens(300, 1), max_tokens=2))
    rig.step()
    assert [type(call) for call in rig.store.calls] == [FindCall]
    assert [state_of(rig, name) for name in "ab"] == [State.WAITING_FOR_KV, State.WAITING]
    rig.store.answer()
    rig.step()
    rig.step()
    assert [state_of(rig, name) for name in "ab"] == [State.RUNNING, State.WAITING]
    rig.settle()


def test_two_that_share_the_last_slots_take_turns() -> None:
    rig = Rig(slots=2, kv=True)
    rig.serve(request("a", tokens(300), max_tokens=1))
    push_out(rig, blocks=False)
    rig.runner.fate = lambda transfer: "wait"
    rig.submit(request("b", tokens(300), max_tokens=9))
    rig.submit(request("c", tokens(300), max_tokens=9))
    for _ in range(5):
        rig.step()
    rig.runner.fate = lambda transfer: "done"
    rig.run()
    assert rig.usage("b").cached_tokens == 300
    assert rig.usage("c").cached_tokens == 300
    rig.settle()


def test_when_a_load_fails_the_next_one_tries_again() -> None:
    rig = Rig(slots=30, pages=64, kv=True, max_batch_tokens=64)  # the first one is slow to compute what it did not get
    rig.serve(request("a", tokens(300), max_tokens=1, hints=(200,)))
    push_out(rig, blocks=False)
    loads: list[int] = []

    def fate(transfer: Transfer) -> Fate:
        if transfer.kind == "load":
            loads.append(transfer.id)
        return "failed" if loads == [transfer.id] else "done"

    rig.runner.fate = fate
    rig.serve(*(request(f"r{i}", tokens(200) + tokens(70, i), max_tokens=2, hints=(200,)) for i in range(3)))
    assert len(loads) == 2
    assert [rig.usage(f"r{i}").cached_tokens for i in (1, 2)] == [200, 200]
    rig.settle()


def test_a_checkpoint_goes_to_the_store_behind_its_blocks() -> None:
    rig = Rig(slots=16, pages=12, kv=True, kv_automatic=False, max_batch_tokens=1024)
    rig.submit(request("a", tokens(640), max_tokens=1, hints=(100,)))
    asked: list[Entry] = []
    while rig.step() or rig.store.calls:
        for call in list(rig.store.calls):
            asked += call.entries if isinstance(call, ReserveCall) else ()
            rig.store.answer()
    names = [entry.key for entry in asked]
    assert len(names) == 10 + 2, "more blocks than may be under way at once"
    for entry in asked:
        assert not entry.parent or names.index(entry.parent) < names.index(entry.key)
    rig.settle()


def test_what_the_device_has_at_a_checkpoint_is_not_asked_for() -> None:
    rig = Rig(slots=16, kv=True)
    rig.serve(request("a", tokens(300), max_tokens=2))
    rig.store.automatic = False
    rig.submit(request("b", tokens(300), max_tokens=2))
    rig.step()
    assert state_of(rig, "b") is State.RUNNING
    assert rig.store.calls == []
    rig.store.automatic = True
    rig.run()
    rig.settle()


def test_a_restarted_engine_is_warm() -> None:
    old = Rig(slots=16, kv=True, pages=64, interval=512)
    history = tokens(700)
    old.serve(request("turn", history, max_tokens=40, hints=(100, 690)))
    new = restarted(old, slots=16, pages=64, interval=512)
    assert warm(new, "repeat", history, hints=(100, 690)) == (0, 700, 0)
    new = restarted(old, slots=16, pages=64, interval=512)
    after_suffix = history[:690] + tokens(50, 8)
    assert warm(new, "no thinking", after_suffix, hints=(100, 690, 735)) == (0, 690, 50)
    new = restarted(old, slots=16, pages=64, interval=512)
    answer = history + old.told["turn"]  # which ends with a token that was sampled and not run
    assert warm(new, "next turn", answer + tokens(60, 8), hints=(100, len(answer), len(answer) + 55)) == (0, 739, 61)
    new = restarted(old, slots=16, pages=64, interval=512)
    assert warm(new, "edited", history[:600] + tokens(60, 8)) == (0, 512, 148), "by the ladder"
    old.settle()


@pytest.mark.parametrize("failing", ["block", "state"])
def test_a_load_that_fails_leaves_what_the_device_has(failing: str) -> None:
    rig = Rig(slots=16, kv=True)
    rig.serve(request("a", tokens(300), max_tokens=2, hints=(64,)))
    push_out(rig)
    assert warm(rig, "short", [*tokens(64), 1], hints=(64,)) == (0, 64, 1)

    def fate(transfer: Transfer) -> Fate:
        broken = transfer.state >= 0 if failing == "state" else transfer.state < 0
        return "failed" if transfer.kind == "load" and broken else "done"

    rig.runner.fate = fate
    assert warm(rig, "b", tokens(300)) == (64, 0, 236)
    rig.settle()


def test_a_connection_lost_amid_the_load_makes_it_a_miss() -> None:
    rig = Rig(slots=16, kv=True)
    rig.serve(request("a", tokens(300), max_tokens=2))
    push_out(rig)
    rig.runner.fate = lambda transfer: "wait"
    rig.submit(request("b", tokens(300), max_tokens=2))
    while not rig.scheduler.transfers_under_way:
        rig.step()
    rig.store.disconnect()  # the fake overwrites the arena
    rig.runner.fate = lambda transfer: "done"
    rig.run()
    assert rig.usage("b").cached_tokens == 0
    rig.settle()


def test_a_store_that_comes_back_empty_is_given_all_checkpoints() -> None:
    rig = Rig(slots=16, kv=True)
    rig.serve(request("a", tokens(300), max_tokens=2, hints=(100,)))
    rig.store.disconnect()
    rig.store.connect()
    rig.run()
    assert len(state_keys(rig)) == 3
    assert rig.store.committed - state_keys(rig) == rig.on_device
    push_out(rig)
    assert warm(rig, "b", tokens(300)) == (0, 300, 0)
    rig.settle()


def test_a_state_that_many_want_is_loaded_once() -> None:
    rig = Rig(slots=30, pages=64, max_running=20, kv=True, max_batch_tokens=1024)
    rig.serve(request("a", tokens(300), max_tokens=1, hints=(200,)))
    push_out(rig, blocks=False)
    loads: list[Transfer] = []
    rig.runner.before_step = lambda batch: loads.extend(t for t in batch.transfers if t.kind == "load")
    rig.serve(*(request(f"r{i}", tokens(200) + tokens(70, i), max_tokens=2, hints=(200,)) for i in range(10)))
    assert [transfer.state >= 0 for transfer in loads] == [True]
    assert [rig.usage(f"r{i}").cached_tokens for i in range(10)] == [200] * 10
    assert sorted(rig.usage(f"r{i}").cached_host for i in range(10)) == [0] * 9 + [8]
    rig.settle()


def test_when_the_one_that_loads_gives_up_another_does() -> None:
    rig = Rig(slots=30, pages=64, kv=True)
    rig.serve(request("a", tokens(300), max_tokens=1, hints=(200,)))
    push_out(rig, blocks=False)
    rig.runner.fate = lambda transfer: "wait"
    for index in range(3):
        rig.submit(request(f"r{index}", tokens(200) + tokens(70, index), max_tokens=2, hints=(200,)))
    while not rig.scheduler.transfers_under_way:
        rig.step()
    rig.cancel("r0")
    rig.cancel("r1")
    rig.step()
    assert state_of(rig, "r2") is State.WAITING_FOR_KV
    rig.runner.fate = lambda transfer: "done"
    rig.run()
    assert rig.finish_of("r0") == rig.finish_of("r1") == "cancel"
    assert rig.usage("r2").cached_tokens == 200
    rig.settle()


@pytest.mark.parametrize("moment", ["asked", "loading", "loaded"])
def test_cancel_at_each_moment_of_a_restore(moment: str) -> None:
    rig = Rig(slots=4, pages=16, kv=True)
    rig.serve(request("a", tokens(300), max_tokens=1))
    push_out(rig)
    rig.store.automatic = False
    rig.runner.fate = lambda transfer: "wait"
    rig.submit(request("gone", tokens(300), max_tokens=1))
    rig.step()
    (call,) = rig.store.calls
    assert isinstance(call, FindCall)
    if moment in ("loading", "loaded"):
        rig.store.answer()
        rig.step()
        assert rig.scheduler.transfers_under_way == 5
    if moment == "loaded":
        rig.runner.fate = lambda transfer: "done"
        rig.step()
    rig.cancel("gone")
    rig.step()
    assert rig.finish_of("gone") == "cancel"
    while rig.store.calls:
        rig.store.answer()
    rig.runner.fate = lambda transfer: "done"
    rig.run()
    rig.store.automatic = True
    assert rig.store.leases == {}
    found = warm(rig, "next", tokens(300))
    assert found == ((300, 0, 0) if moment in ("loading", "loaded") else (0, 300, 0)), "what was loaded is kept"
    rig.settle()


def test_a_preempted_request_comes_back_from_the_store() -> None:
    """Its state and tail are kept until they are written, so it loses full blocks only, which the store has."""
    rig = Rig(slots=8, pages=8, kv=True)
    rows: list[Row] = []
    rig.runner.before_step = lambda batch: rows.extend(batch.rows)
    rig.submit(request("old", tokens(120), max_tokens=330))
    rig.submit(request("young", tokens(150, 1), max_tokens=200))
    rig.run()
    assert rig.usage("young").preemptions == 1
    assert sum(len(row.tokens) for row in rows if row.request_id == "young") == 150 + 199, "no token was run twice"
    rig.settle()


def test_a_superseded_checkpoint_that_was_not_written_yet_is_not_written() -> None:
    rig = Rig(slots=7, pages=64, kv=True, interval=128, kv_automatic=False)
    rig.submit(request("a", tokens(600), max_tokens=2))
    while rig.step():
        for index, call in reversed(list(enumerate(rig.store.calls))):
            if isinstance(call, (FindCall, LeaseCall)):
                rig.store.answer(index)
    assert rig.finish_of("a") == "length"
    rig.settle()
    written = sorted(int.from_bytes(key[-8:], "little") for key in state_keys(rig))
    assert positions(rig) == [128, 256, 384, 512, 600, 601]
    assert written == [128, 600, 601], "one at a time; the rungs between were passed meanwhile"


# The matrix of the issue.

Way = Callable[[Rig, list[int]], None]


def cold(rig: Rig, prompt: list[int]) -> None:
    return None


def resumed(rig: Rig, prompt: list[int]) -> None:
    rig.serve(request("before", prompt[:-60], max_tokens=1))


def from_store(rig: Rig, prompt: list[int]) -> None:
    resumed(rig, prompt)
    push_out(rig)


@pytest.mark.parametrize("preempted", [False, True])
@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize("chunk", [64, 4096])
@pytest.mark.parametrize("way", [cold, resumed, from_store])
def test_every_way_gives_the_same_tokens(way: Way, chunk: int, others: int, preempted: bool) -> None:
    rig = Rig(slots=16, pages=64, kv=True, max_batch_tokens=chunk)
    prompt = tokens(500)
    way(rig, prompt)
    for index in range(others):
        rig.submit(request(f"other{index}", tokens(90 + 50 * index, 50 + index), max_tokens=60))
    rig.submit(request("this", prompt, max_tokens=40, hints=(130, 440, 495)))
    rig.step()
    if preempted:
        for moment in (450, 510):
            while (sequence := rig.scheduler._active["this"]).computed < moment:
                rig.step()
            preempt(rig.scheduler, sequence)
    rig.run()
    assert rig.told["this"] == continuation(prompt, 40)
    assert rig.usage("this").preemptions == 2 * preempted
    expected = (0, 0) if way is cold else (440, 0) if way is resumed else (0, 440)
    usage = rig.usage("this")
    assert (usage.cached_device, usage.cached_host) == expected
    assert usage.computed_tokens == 500 - sum(expected)
    rig.settle()


def test_a_dense_model_takes_no_notice() -> None:
    rig = Rig(kv=True)
    rig.runner.keep_batches = True
    rig.serve(request("a", tokens(300), max_tokens=5, hints=(100, 290)))
    rig.serve(request("b", tokens(300), max_tokens=5, hints=(100, 290)))
    assert not any(batch.before or batch.after for batch in rig.runner.batches)
    assert all(row.state == -1 for batch in rig.runner.batches for row in batch.rows)
    assert rig.usage("b").cached_device == 4 * BLOCK_TOKENS
    assert not state_keys(rig)
    rig.settle()
