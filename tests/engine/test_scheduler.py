import random
import time

import pytest

from services.engine.batch import ModelOutput, Sampled, ScheduledBatch
from services.engine.scheduler import Scheduler, SchedulerConfig
from services.protocol.hashing import BLOCK_TOKENS
from tests.engine.rig import Rig, request
from tests.fakes import continuation


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(251) for _ in range(count)]


def test_a_cold_run_is_exact() -> None:
    rig = Rig()
    rig.serve(request("a", tokens(100), max_tokens=5))
    assert rig.told["a"] == continuation(tokens(100), 5)
    assert rig.finish_of("a") == "length"
    usage = rig.usage("a")
    assert (usage.prompt_tokens, usage.output_tokens, usage.computed_tokens, usage.cached_tokens) == (100, 5, 100, 0)
    timeline = rig.results[-1].finished[0]
    assert 0 < timeline.arrived <= timeline.scheduled < timeline.first_token < timeline.finished
    assert usage.prefill_seconds == pytest.approx((timeline.first_token - timeline.scheduled) / 1e9)
    rig.settle()


def test_an_exact_repeat_computes_one_token_and_writes_none() -> None:
    rig = Rig()
    rig.serve(request("a", tokens(128), max_tokens=1))
    rig.runner.keep_batches = True
    rig.serve(request("b", tokens(128), max_tokens=3))
    (row,) = rig.runner.batches[0].rows
    assert (row.start, row.write_from, len(row.tokens)) == (127, 128, 1)
    usage = rig.usage("b")
    assert (usage.cached_device, usage.computed_tokens) == (127, 1)
    rig.settle()


def test_the_next_turn_finds_prompt_and_answer() -> None:
    rig = Rig()
    rig.serve(request("a", tokens(100), max_tokens=100))
    context = tokens(100) + rig.told["a"]
    rig.serve(request("b", context + tokens(30, seed=1)))
    assert rig.usage("b").cached_device == (len(context) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    rig.settle()


def test_salts_share_nothing() -> None:
    rig = Rig()
    rig.serve(request("a", tokens(128), salt="one"))
    rig.serve(request("b", tokens(128), salt="two"))
    assert rig.usage("b").cached_tokens == 0
    rig.serve(request("c", tokens(128), salt="two"))
    assert rig.usage("c").cached_tokens == 127
    rig.settle()


def test_of_many_that_come_at_once_one_reads_the_shared_prompt() -> None:
    rig = Rig(pages=200, max_batch_tokens=128, max_running=40)
    shared = tokens(640)
    rig.serve(*(request(f"agent{index}", shared + tokens(20, seed=index), max_tokens=2) for index in range(40)))
    assert sum(rig.runner.prompt_tokens_run.values()) <= 640 + 40 * 20 + 2 * 128
    rig.settle()


def test_the_next_token_has_its_page_a_step_early() -> None:
    """Where pages are plenty: so the runner need not wait to be asked."""
    for pages, early in ((32, True), (3, False)):
        rig, held = Rig(pages=pages), {}

        def seen(batch: ScheduledBatch, held: dict[int, int] = held) -> None:
            held.update((row.start, len(row.pages)) for row in batch.rows)

        rig.runner.before_step = seen
        rig.serve(request("a", tokens(120), max_tokens=30))
        assert (held[126], held[127], held[128]) == (2, 3 if early else 2, 3)
        rig.settle()


def test_a_long_prefill_does_not_stop_a_decode() -> None:
    rig = Rig(pages=80, max_batch_tokens=64)
    rig.submit(request("a", tokens(10), max_tokens=100))
    rig.step()
    rig.submit(request("b", tokens(64 * 40, seed=1), max_tokens=1))
    before = len(rig.told["a"])
    for _ in range(20):
        rig.step()
    assert len(rig.told["a"]) == before + 20
    assert rig.runner.prompt_tokens_run["b"] >= 20 * 32
    rig.run()
    rig.settle()


def test_more_decodes_than_a_step_holds_take_turns_and_let_a_prefill_in() -> None:
    rig = Rig(max_batch_tokens=4, max_running=12)
    for index in range(8):
        rig.submit(request(f"d{index}", tokens(1, seed=index), max_tokens=50))
    while len([name for name in rig.told if rig.told[name]]) < 8:
        rig.step()
    told = {name: len(rig.told[name]) for name in rig.told}
    rig.submit(request("p", tokens(40, seed=99), max_tokens=1))
    for _ in range(24):
        rig.step()
    assert rig.runner.prompt_tokens_run["p"] >= 24
    gained = [len(rig.told[name]) - told[name] for name in told]
    assert min(gained) >= 8
    assert max(gained) - min(gained) <= 1
    rig.run()
    rig.settle()


def test_the_queue_is_left_at_its_front_only() -> None:
    rig = Rig(pages=16)
    rig.submit(request("big", tokens(64 * 9), max_tokens=64 * 3))
    rig.step()
    rig.submit(request("big too", tokens(64 * 10, seed=1), max_tokens=1))
    rig.submit(request("small", tokens(10, seed=2), max_tokens=1))
    while not rig.final:
        rig.step()
        assert not rig.told["small"], "overtook the one before it"
    assert set(rig.final) == {"big"}
    assert rig.load.waiting == 2 or rig.told["small"] == []
    rig.run()
    rig.settle()


def test_cached_pages_are_not_counted_twice_at_admission() -> None:
    rig = Rig(pages=8)
    rig.serve(request("first", tokens(256), max_tokens=1))
    rig.submit(request("long", tokens(200, 1), max_tokens=40))
    rig.step()
    rig.submit(request("again", tokens(256), max_tokens=2))  # 4 cached pages and a fifth; 4 are available
    rig.step()
    assert (rig.load.running, rig.load.waiting, rig.load.pages_free) == (1, 1, 4)
    rig.run()
    assert rig.usage("again").cached_device == 255
    assert rig.usage("again").preemptions == 0
    rig.settle()


def test_when_pages_run_out_the_youngest_gives_way() -> None:
    rig = Rig(pages=8)
    prompts = {name: tokens(120, seed) for seed, name in enumerate(("old", "young"))}
    rig.serve(*(request(name, prompt, max_tokens=300) for name, prompt in prompts.items()))
    assert rig.usage("old").preemptions == 0
    assert rig.usage("young").preemptions >= 1
    assert sum(result.stats.preemptions for result in rig.results) == rig.usage("young").preemptions
    assert sum(result.stats.decode_tokens for result in rig.results) <= 600, "to read again is to prefill"
    for name, prompt in prompts.items():  # the rig has checked that no token came twice
        assert rig.told[name] == continuation(prompt, 300)
    rig.settle()


def test_a_preempted_request_goes_before_those_that_wait() -> None:
    rig = Rig(pages=8, max_running=2)
    rig.submit(request("a", tokens(120), max_tokens=300))
    rig.submit(request("b", tokens(120, 1), max_tokens=300))
    rig.submit(request("c", tokens(120, 2), max_tokens=300))
    order: list[str] = []
    while rig.step():
        order += [name for name in rig.final if name not in order]
    assert order == ["a", "b", "c"]
    rig.settle()


def test_one_request_may_fill_the_pool() -> None:
    rig = Rig(pages=4)
    rig.serve(request("a", tokens(100), max_tokens=64 * 4 - 100))
    assert len(rig.told["a"]) == 156
    rig.serve(request("b", tokens(100, 1), max_tokens=1_000_000))
    assert len(rig.told["b"]) == 156
    assert rig.finish_of("b") == "length"
    rig.settle()


def test_the_context_length_ends_an_answer() -> None:
    rig = Rig(max_model_len=50)
    rig.serve(request("a", tokens(40), max_tokens=100))
    assert (len(rig.told["a"]), rig.finish_of("a")) == (10, "length")
    rig.serve(request("b", tokens(50), max_tokens=100))
    assert (rig.told["b"], rig.finish_of("b")) == ([], "length")
    rig.settle()


def test_a_stop_token_ends_an_answer_and_is_sent() -> None:
    answer = continuation(tokens(20), 10)
    stop = answer[6]
    rig = Rig()
    rig.serve(request("a", tokens(20), max_tokens=50, stop=(stop, 1000)))
    assert rig.told["a"] == answer[: answer.index(stop) + 1]
    assert rig.finish_of("a") == "stop"
    rig.settle()


@pytest.mark.parametrize("burst", [2, 3, 7])
def test_several_tokens_a_step_are_cut_where_the_answer_ends(burst: int) -> None:
    answer = continuation(tokens(20), 20)
    rig = Rig()
    rig.runner.burst = lambda name, position: burst
    rig.submit(request("stop", tokens(20), max_tokens=50, stop=(answer[9],)))
    rig.submit(request("length", tokens(20), max_tokens=11))
    rig.run()
    assert rig.told["stop"] == answer[: answer.index(answer[9]) + 1]
    assert rig.told["length"] == answer[:11]
    rig.settle()


def test_no_token_is_as_valid() -> None:
    rig = Rig()
    calls: list[int] = []

    def burst(name: str, position: int) -> int:
        calls.append(position)
        return int(len(calls) % 4 == 0)

    rig.runner.burst = burst
    rig.serve(request("a", tokens(64), max_tokens=5))
    assert len(rig.told["a"]) == 5
    assert rig.usage("a").computed_tokens == 64
    assert sum(result.stats.rows for result in rig.results) == 20, "each step is told, also one that gave nothing"
    rig.settle()


@pytest.mark.parametrize("given", [1, 5, 63, 64, 65])
def test_a_resumed_request_goes_on_behind_its_tokens(given: int) -> None:
    answer = continuation(tokens(70), 80)
    rig = Rig()
    rig.serve(request("a", tokens(70), max_tokens=80, generated=answer[:given]))
    assert rig.told["a"] == answer
    deltas = [delta for result in rig.results for _, delta in result.deltas]
    assert deltas[0].offset == given
    assert rig.usage("a").output_tokens == 80
    rig.settle()


def test_a_resumed_request_that_was_complete_ends_at_once() -> None:
    answer = continuation(tokens(70), 10)
    rig = Rig()
    rig.serve(
        request("length", tokens(70), max_tokens=10, generated=answer),
        request("stop", tokens(70), max_tokens=50, generated=answer, stop=(answer[-1],)),
    )
    assert (rig.finish_of("length"), rig.finish_of("stop")) == ("length", "stop")
    assert rig.runner.prompt_tokens_run == {}
    rig.settle()


def test_requests_that_cannot_run_are_answered() -> None:
    rig = Rig()
    rig.submit(request("nothing wanted", tokens(5), max_tokens=0))
    rig.run()
    assert rig.finish_of("nothing wanted") == "length"
    rig.scheduler.submit(request("empty", []))
    result = rig.scheduler.result()
    assert result is not None
    assert [(delta.finish, delta.error) for _, delta in result.deltas] == [("error", "the prompt is empty")]
    rig.settle()


def test_a_request_that_is_there_already_is_not_run_twice() -> None:
    rig = Rig()
    rig.submit(request("a", tokens(5), max_tokens=3))
    rig.step()
    rig.scheduler.submit(request("a", tokens(5), max_tokens=3))
    rig.run()
    assert rig.told["a"] == continuation(tokens(5), 3)
    rig.settle()


def test_cancel_while_waiting_running_and_preempted() -> None:
    rig = Rig(pages=8, max_batch_tokens=64, max_running=2)
    rig.submit(request("old", tokens(120), max_tokens=300))
    rig.submit(request("prefill", tokens(120, 1), max_tokens=300))
    rig.submit(request("waiting", tokens(120, 2), max_tokens=300))
    rig.step()
    rig.cancel("waiting")
    rig.cancel("prefill")
    rig.cancel("nobody")
    rig.step()
    assert {name: rig.finish_of(name) for name in rig.final} == {"waiting": "cancel", "prefill": "cancel"}
    assert rig.usage("waiting").computed_tokens == 0
    rig.submit(request("young", tokens(120, 3), max_tokens=300))
    while not rig.scheduler._waiting:
        rig.step()
    assert rig.told["young"], "was preempted"
    rig.cancel("young")
    rig.step()
    assert rig.finish_of("young") == "cancel"
    assert rig.usage("young").preemptions == 1
    rig.cancel("old")
    rig.cancel("old")
    rig.step()
    assert rig.finish_of("old") == "cancel"
    rig.settle()


def test_a_row_without_distribution_ends_that_request_only() -> None:
    rig = Rig()
    rig.submit(request("good", tokens(10), max_tokens=3))
    rig.runner.expect("bad", tokens(64, 1))
    rig.scheduler.submit(request("bad", tokens(64, 1), max_tokens=3))
    while rig.inbox.qsize():
        rig.scheduler.submit(rig.inbox.get().request)  # type: ignore[union-attr]
    batch = rig.scheduler.schedule()
    assert batch is not None
    output = rig.runner.run(batch)
    sampled = {**output.sampled, "bad": Sampled((), finish="error")}
    rig.scheduler.update(ModelOutput(batch.step, sampled), 0.01)
    result = rig.scheduler.result()
    assert result is not None
    final = {delta.request_id: delta for _, delta in result.deltas if delta.finish}
    assert final["bad"].finish == "error"
    assert "distribution" in final["bad"].error
    assert result.stored == (), "what such a request computed is not worth keeping"
    rig.told["good"] += [token for _, delta in result.deltas if delta.request_id == "good" for token in delta.tokens]
    rig.run()
    assert rig.told["good"] == continuation(tokens(10), 3)


def test_a_request_is_left_out_until_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    scheduler = Scheduler(SchedulerConfig("fake", pages=4, max_model_len=100))
    scheduler.submit(request("a", tokens(3), max_tokens=10))

    def output(batch: ScheduledBatch | None) -> None:
        assert batch is not None
        scheduler.update(ModelOutput(batch.step, {"a": Sampled((1,), due=1005.0)}), 0.0)

    output(scheduler.schedule())
    assert scheduler.schedule() is None
    assert scheduler.next_due == 1005.0
    now = 1005.0
    output(scheduler.schedule())
    scheduler.cancel("a")
    assert scheduler.schedule() is None
    assert scheduler.next_due is None


def test_all_end_when_the_device_is_gone() -> None:
    rig = Rig(pages=8, max_running=2, kv=True, kv_automatic=False)
    for index in range(4):
        rig.submit(request(f"r{index}", tokens(100, index)))
    rig.step()
    rig.scheduler.fail("out of order")
    result = rig.scheduler.result(fatal="out of order")
    assert result is not None
    assert result.fatal == "out of order"
    assert [(d.request_id, d.finish, d.error) for _, d in result.deltas] == [
        (f"r{index}", "error", "out of order") for index in range(4)
    ]


def test_load_and_stats_tell_what_happens() -> None:
    rig = Rig(pages=16, max_running=1, max_batch_tokens=100)
    rig.submit(request("a", tokens(150), max_tokens=2))
    rig.submit(request("b", tokens(30, 1), max_tokens=2))
    rig.step()
    assert (rig.load.running, rig.load.waiting, rig.load.pages_total, rig.load.pages_free) == (1, 1, 16, 15)
    assert rig.load.pending_prefill_tokens == (150 - 64) + 30
    rig.run()
    stats = [result.stats for result in rig.results]
    assert sum(step.prefill_tokens for step in stats) == 180
    assert sum(step.decode_tokens for step in stats) == 2
    rig.settle()


def test_a_snapshot_lists_what_the_events_told() -> None:
    rig = Rig(pages=6)
    for index in range(6):
        rig.serve(request(f"r{index}", tokens(200, index)))
    rig.scheduler.snapshot()
    result = rig.scheduler.result()
    assert result is not None
    assert set(result.snapshot or ()) == rig.on_device
    assert len(rig.on_device) >= 5
    assert rig.scheduler.result() is None, "nothing new"


@pytest.mark.parametrize(("name", "value"), [("max_batch_tokens", 1), ("max_running", 0), ("max_model_len", 0)])
def test_settings_that_cannot_work_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name):
        SchedulerConfig(**{"fingerprint": "fake", "pages": 4, "max_model_len": 100, name: value})  # type: ignore[arg-type]
