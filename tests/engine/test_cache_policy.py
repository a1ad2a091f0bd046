"""What the scheduler keeps of whom, what it brings back before it is asked, and what it says of what is gone."""

import time

import pytest

from services.engine.batch import Transfer
from services.engine.mailbox import Inspect, NoteSession
from services.engine.planner import PATIENCE
from services.engine.request import State
from services.protocol.events import CachedRun
from services.protocol.generate import Missed
from services.protocol.hashing import BLOCK_TOKENS, chain, root
from tests.engine.rig import FINGERPRINT, Rig, request
from tests.engine.test_resume import push_out
from tests.engine.test_scheduler import tokens
from tests.fakes import Fate, LeaseCall


def reason(missed: Missed | None) -> tuple[str, int, int] | None:
    return None if missed is None else (missed.reason, missed.position, missed.seen)


# Who is kept.


def test_side_requests_do_not_push_out_who_waits_for_a_tool() -> None:
    rig = Rig(pages=40, slots=64, kv=False)
    rig.serve(request("main", tokens(20 * 64), session="agent", max_tokens=2, hints=(100,)))
    rig.inbox.put(NoteSession("agent", "waiting"))
    for index in range(40):
        title = request(f"title{index}", tokens(5 * 64 + 9, seed=index + 1), session=f"side{index}", standing="one_off")
        rig.serve(title)
    context = tokens(20 * 64) + rig.told["main"]
    rig.serve(request("next", context + tokens(30, seed=99), session="agent"))
    assert rig.usage("next").computed_tokens <= 31
    rig.settle()


def test_without_the_note_they_would_have_in_time() -> None:
    """The test above can fail: an hour later a finished sub-agent's context goes for the first title."""
    rig = Rig(pages=40, slots=64, kv=False)
    rig.serve(request("main", tokens(20 * 64), session="agent", max_tokens=2, standing="finished"))
    for index in range(40):
        rig.serve(request(f"title{index}", tokens(5 * 64 + 9, seed=index + 1), session=f"side{index}"))
    context = tokens(20 * 64) + rig.told["main"]
    rig.serve(request("next", context + tokens(30, seed=99), session="agent"))
    assert rig.usage("next").computed_tokens > 64
    rig.settle()


def test_the_store_is_told_what_a_session_is_now() -> None:
    rig = Rig(kv=True)
    rig.serve(request("a", tokens(130), session="sub", standing="finished"))
    names = list(chain(root(FINGERPRINT), tokens(130)))
    assert rig.store.chances == {names[-1]: 2.0**-6}
    rig.inbox.put(NoteSession("sub", "waiting"))
    rig.inbox.put(NoteSession("nobody", "waiting"))
    rig.core.resume_at = 0.0
    rig.run()
    assert rig.store.chances == {names[-1]: 1.0}
    rig.settle()


def test_a_note_about_a_session_that_runs_comes_too_late() -> None:
    rig = Rig(kv=True)
    rig.submit(request("a", tokens(130), session="s", max_tokens=30))
    rig.step()
    rig.inbox.put(NoteSession("s", "finished"))
    rig.step()
    owner = rig.scheduler._owners.known("s")
    assert owner is not None
    assert owner.standing == "live"
    rig.run()
    assert owner.standing == "idle"
    rig.settle()


def test_a_prefill_waits_until_the_store_has_what_it_pushes_out() -> None:
    """Four contexts in turns through a pool of one and a half: each is read once."""
    rig = Rig(pages=24, kv=True, kv_automatic=False, max_batch_tokens=2048)

    def serve(name: str, seed: int) -> None:
        rig.submit(request(name, tokens(16 * 64, seed), max_tokens=1, session=f"s{seed}"))
        while rig.step() or rig.store.calls:
            if rig.store.calls:  # an answer a step, as from another process
                rig.store.answer()

    for turn in range(3):
        for seed in range(4):
            serve(f"{turn}/{seed}", seed)
            assert rig.usage(f"{turn}/{seed}").computed_tokens <= (16 * 64 if turn == 0 else 1)
    rig.settle()


def test_a_store_that_hangs_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(pages=20, kv=True, kv_automatic=False, max_batch_tokens=2048)
    rig.serve(request("a", tokens(16 * 64, 1), max_tokens=1))  # nobody answers the store's calls
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    rig.submit(request("b", tokens(8 * 64, 2), max_tokens=1))
    for _ in range(5):
        rig.step()
        for index, call in enumerate(rig.store.calls):
            if isinstance(call, LeaseCall):
                rig.store.answer(index)
    assert "b" not in rig.final
    assert rig.core.resume_at == pytest.approx(now + PATIENCE)
    now += PATIENCE + 0.01
    rig.run()
    assert rig.finish_of("b") == "length"
    rig.settle()


# What is not computed twice.


def test_two_that_come_at_once_compute_one_prompt() -> None:
    for slots in (0, 8):
        rig = Rig(pages=64, max_batch_tokens=4096, slots=slots)
        rig.serve(*(request(f"r{i}", tokens(1000), max_tokens=3) for i in range(3)))
        computed = sum(rig.usage(f"r{i}").computed_tokens for i in range(3))
        assert computed <= 1000 + 2 * (1000 % 64) * (not slots)
        rig.settle()


def test_where_two_part_a_state_is_kept_though_nobody_hinted_at_it() -> None:
    rig = Rig(pages=64, max_batch_tokens=256, slots=8)
    shared = tokens(700)
    rig.submit(request("a", shared + tokens(300, seed=1), max_tokens=3))
    rig.step()
    rig.serve(request("b", shared + tokens(300, seed=2), max_tokens=3))
    border = 700 // BLOCK_TOKENS * BLOCK_TOKENS
    assert rig.usage("b").cached_device == border
    rig.settle()


def test_the_queue_is_brought_to_the_device_while_it_waits() -> None:
    for slots in (0, 20):
        rig = Rig(pages=64, max_running=1, kv=True, slots=slots)
        rig.serve(request("a", tokens(640 + 32), max_tokens=1))
        push_out(rig) if slots else rig.scheduler._pool.release(rig.scheduler._pool.allocate(64))
        rig.submit(request("long", tokens(70, seed=5), max_tokens=60))
        rig.step()
        rig.submit(request("waits", tokens(640 + 32) + tokens(9, seed=1), max_tokens=2))
        for _ in range(10):
            rig.step()
        assert rig.requests["waits"].state is State.WAITING
        assert rig.scheduler._pool.find(list(chain(root(FINGERPRINT), tokens(640)))[-1]) is not None
        rig.run()
        usage = rig.usage("waits")
        assert (usage.cached_device, usage.cached_host) == (0, 672 if slots else 640)
        assert usage.restore_seconds > 0
        rig.settle()


def test_who_leaves_the_queue_while_it_is_brought_leaves_nothing() -> None:
    def never(transfer: Transfer) -> Fate:
        return "waits" if transfer.kind == "load" else "done"

    for when in range(6):
        rig = Rig(pages=64, max_running=1, kv=True, kv_automatic=False, slots=20)
        rig.submit(request("a", tokens(640 + 32), max_tokens=1))
        while rig.step() or rig.store.calls:
            if rig.store.calls:
                rig.store.answer()
        push_out(rig)
        rig.runner.fate = never
        rig.submit(request("long", tokens(70, seed=5), max_tokens=60))
        rig.step()
        rig.submit(request("waits", tokens(640 + 32) + tokens(9, seed=1), max_tokens=2))
        for _ in range(when):
            rig.step()
            if rig.store.calls:
                rig.store.answer()
        rig.cancel("waits")
        rig.step()
        assert rig.finish_of("waits") == "cancel"
        rig.settle()


def test_a_hole_in_a_context_is_filled_and_what_is_behind_it_stays() -> None:
    for slots in (0, 20):
        rig = Rig(pages=64, kv=True, slots=slots)
        rig.serve(request("a", tokens(640 + 32), max_tokens=1))
        pool, names = rig.scheduler._pool, list(chain(root(FINGERPRINT), tokens(640)))
        behind = [page for name in names[4:] if (page := pool.find(name)) is not None]
        tails = [page.page for page in pool.pages() if page.block.tail]
        pool.acquire([*behind, *tails])
        pool.release(pool.allocate(pool.available))
        pool.release([*behind, *tails])
        assert [pool.find(name) is None for name in names] == [True] * 4 + [False] * 6
        before = rig.scheduler._offload.loaded, rig.scheduler._offload.loaded_checkpoints
        rig.serve(request("b", tokens(640 + 32) + tokens(9, seed=1), max_tokens=2))
        assert rig.usage("b").cached_tokens == (672 if slots else 640)
        assert (rig.scheduler._offload.loaded, rig.scheduler._offload.loaded_checkpoints) == (before[0] + 4, before[1])
        rig.settle()


def test_the_state_that_is_here_stays_while_the_store_is_asked_for_a_deeper_one() -> None:
    rig = Rig(pages=200, slots=3, kv=True, kv_automatic=False)
    rig.submit(request("a", tokens(300), max_tokens=1))
    while rig.step() or rig.store.calls:
        if rig.store.calls:
            rig.store.answer()
    rig.submit(request("b", tokens(300) + tokens(200, seed=1), max_tokens=1))
    rig.step()
    assert rig.requests["b"].state is State.WAITING_FOR_KV
    for index in range(2):  # they take all slots that are to be had
        rig.submit(request(f"c{index}", tokens(100, seed=7 + index), max_tokens=1))
        rig.step()
    while rig.step() or rig.store.calls:
        if rig.store.calls:
            rig.store.answer()
    assert rig.usage("b").cached_tokens >= 299
    rig.settle()


# What is said of what is gone.


@pytest.mark.parametrize("slots", [0, 8])
def test_why_a_prompt_was_computed(slots: int) -> None:
    rig = Rig(pages=32, slots=slots)
    rig.serve(request("a", tokens(640), max_tokens=1, session="first"))
    assert reason(rig.usage("a").missed) == ("new", 0, 0)
    rig.serve(request("again", tokens(640), max_tokens=1, session="first"))
    assert rig.usage("again").missed is None
    rig.serve(request("greedy", tokens(31 * 64, seed=1), max_tokens=1, session="other"))
    rig.serve(request("b", tokens(640), max_tokens=1, session="first"))
    missed = rig.usage("b").missed
    assert missed is not None
    assert (missed.reason, missed.taker) == ("evicted", "other")
    assert missed.seen == 640
    assert time.time() - 60 < missed.since <= time.time()
    rig.settle()


def test_why_when_there_was_a_store() -> None:
    rig = Rig(pages=32, kv=True, kv_capacity=4)
    rig.serve(request("a", tokens(640), max_tokens=1))
    rig.serve(request("greedy", tokens(31 * 64, seed=1), max_tokens=1))
    rig.serve(request("b", tokens(640), max_tokens=1))
    assert reason(rig.usage("b").missed) == ("store_full", 256, 640)
    rig.serve(request("greedy again", tokens(31 * 64, seed=1), max_tokens=1))
    for name in list(rig.store.committed):
        rig.store.forget(name)
    rig.serve(request("c", tokens(640), max_tokens=1))
    missed = rig.usage("c").missed
    assert missed is not None
    assert missed.reason == "store_lost"
    rig.serve(request("greedy once more", tokens(31 * 64, seed=1), max_tokens=1))
    rig.store.disconnect()
    rig.serve(request("d", tokens(640), max_tokens=1))
    missed = rig.usage("d").missed
    assert missed is not None
    assert missed.reason in ("store_away", "store_full")
    rig.settle()


def test_why_when_no_state_was_kept_where_the_prompts_part() -> None:
    rig = Rig(pages=64, slots=8)
    rig.serve(request("a", tokens(640), max_tokens=1))
    rig.serve(request("b", tokens(400) + tokens(200, seed=1), max_tokens=1))
    assert reason(rig.usage("b").missed) == ("no_checkpoint", 0, 384)
    rig.settle()


# What can be seen of it.


def test_the_tree_of_contexts() -> None:
    rig = Rig(pages=16, slots=8, kv=True)
    shared = tokens(256)
    rig.serve(request("a", shared + tokens(200, seed=1), max_tokens=1, session="a", hints=(256,)))
    rig.serve(request("b", shared + tokens(130, seed=2), max_tokens=1, session="b", standing="finished", hints=(256,)))
    rig.inbox.put(Inspect())
    rig.core.resume_at = 0.0
    rig.step()
    runs = seen(rig)
    assert [(run.start, run.tokens, run.session_id, run.standing, run.shared) for run in runs] == [
        (0, 256, "b", "finished", True),
        (256, 128, "b", "finished", False),
        (256, 192, "a", "idle", False),
    ]
    trunk, b, a = runs
    assert trunk.parent == b""
    assert a.parent == b.parent == trunk.name
    assert (trunk.device, trunk.host, trunk.held) == (256, 256, 0)
    assert [position for position, _ in trunk.checkpoints] == [256]
    assert {456, 457} >= {position for position, tier in a.checkpoints if tier == "device"} > set()
    push_out(rig)
    rig.inbox.put(Inspect())
    rig.core.resume_at = 0.0
    rig.step()
    runs = seen(rig)
    assert runs[0].start == 0
    assert {(run.start, run.tokens, run.device, run.host) for run in runs} == {
        (0, 256, 0, 256),
        (256, 128, 0, 128),
        (256, 192, 0, 192),
    }
    assert {tier for run in runs for _, tier in run.checkpoints} == {"host"}
    rig.settle()


def seen(rig: Rig) -> tuple[CachedRun, ...]:
    sight = rig.results[-1].sight
    assert sight is not None
    return sight.runs


def test_a_restore_that_needs_the_whole_pool_is_not_kept_out_by_what_it_would_go_on_from() -> None:
    rig = Rig(pages=9, slots=3, kv=True, gap=1)
    rig.serve(request("a", tokens(451), max_tokens=1))
    rig.serve(request("b", tokens(519), max_tokens=1))
    pool, names = rig.scheduler._pool, list(chain(root(FINGERPRINT), tokens(519)))
    push_out(rig)
    rig.serve(request("c", tokens(451), max_tokens=1))
    assert pool.find(names[7]) is None
    rig.submit(request("d", tokens(520), max_tokens=1))
    rig.run(200)
    assert rig.usage("d").cached_tokens >= 451
    rig.settle()


@pytest.mark.parametrize("lag", [0, 1, 3, 15])
def test_a_client_that_hung_up_comes_back_with_what_it_had_read(lag: int) -> None:
    """A few tokens less than what was run, which a recurrent state cannot be cut back to."""
    rig = Rig(pages=64, slots=8)
    rig.submit(request("a", tokens(300), max_tokens=500))
    while len(rig.told["a"]) < 205:
        rig.step()
    rig.cancel("a")
    rig.run()
    read = rig.told["a"][: 205 - lag]
    rig.serve(request("b", tokens(300) + read + tokens(20, seed=1), max_tokens=1))
    assert rig.usage("b").computed_tokens <= 20 + 16 + 1
    rig.settle()


def test_states_that_roll_along_push_out_nothing() -> None:
    rig = Rig(pages=64, slots=4)
    for seed in range(3):
        rig.serve(request(f"kept{seed}", tokens(200, seed=seed), max_tokens=1, session=f"kept{seed}"))
    rig.serve(request("long", tokens(100, seed=9), max_tokens=1))
    kept = {checkpoint.mark.key for checkpoint in rig.scheduler._checkpoints.all()}
    rig.submit(request("long again", tokens(100, seed=9) + tokens(10, seed=8), max_tokens=300))
    while len(rig.told["long again"]) < 200:
        rig.step()
    there = {checkpoint.mark.key for checkpoint in rig.scheduler._checkpoints.all()}
    assert len(kept & there) >= len(kept) - 2, "one for its own state, one for its prompt's end"
    rig.run()
    rig.settle()
