import pytest
import torch

from services.engine.batch import SampleSpec, ScheduledBatch, Transfer
from services.engine.sampler import SampleRow, sample
from services.protocol.generate import SamplingParams
from services.protocol.kv import Extent
from tests.devices import DEVICES
from tests.engine.arenas import arena
from tests.engine.tiny_models import Bench, decoder, oracle, random_ids, row

SAMPLED = SamplingParams(max_tokens=8, temperature=1.3, top_p=0.95, seed=7)


def generate(bench: Bench, prompt: list[int], pages: list[int], steps: int, chunk: int, others: int = 0) -> list[int]:
    """`steps` tokens behind `prompt`, prefilled `chunk` tokens at a time, beside `others` unrelated requests."""
    ids = list(prompt)
    start = 0
    while len(ids) < len(prompt) + steps:
        end = min(start + chunk, len(ids))
        beside = [
            row(random_ids(20 + 31 * n, n), 0, 20 + 31 * n, range(16 + 2 * n, 19 + 2 * n), f"other{n}", params=SAMPLED)
            for n in range(others)
        ]
        bench.run(*beside, row(ids, start, end, pages, samples=end == len(ids), params=SAMPLED))
        start = end
        if end == len(ids):
            ids += bench.output.sampled["r"].tokens
    return ids[len(prompt) :]


@pytest.mark.parametrize("device", DEVICES)
def test_same_tokens_however_they_are_computed(device: torch.device) -> None:
    model = decoder(oracle("llama"), device)
    prompt = random_ids(90, seed=1)
    alone = generate(Bench(model), prompt, [0, 1], 8, chunk=90)
    assert len(set(alone)) > 2  # it is drawn, not stuck
    assert generate(Bench(model), prompt, [5, 3], 8, chunk=37) == alone
    assert generate(Bench(model), prompt, [0, 1], 8, chunk=64, others=3) == alone
    # Preempted after 3 tokens: prompt and output are prefilled again, and it goes on.
    assert generate(Bench(model), prompt + alone[:3], [2, 1], 5, chunk=50) == alone[3:]


def test_the_draw_is_that_of_the_token_s_absolute_position() -> None:
    bench = Bench(decoder(oracle("llama")))
    ids = random_ids(70, seed=6)
    for start, end in ((0, 60), (60, 69), (69, 70)):
        logits = bench.run(row(ids, start, end, [0, 1], params=SAMPLED))
        expected = sample(logits.clone(), [SampleRow("r", SampleSpec(SAMPLED, ids[:end], []), position=end)])
        assert bench.output.sampled["r"] == expected[0]


def test_broken_logits_end_their_own_row_only() -> None:
    model = decoder(oracle("llama"))
    bench = Bench(model)
    good, bad = random_ids(70, seed=2), random_ids(10, seed=3)
    expected = bench.run(row(good, 0, 70, [0, 1]))[0].argmax()
    bench.run(row(bad, 0, 9, [2], samples=False))
    bench.pages.layers[1].keys.codes[2, 4] = torch.inf  # a key that overflowed
    bench.run(row(bad, 9, 10, [2], "bad"), row(good, 69, 70, [0, 1], "good"))
    assert bench.output.sampled["bad"].finish == "error"
    assert bench.output.sampled["bad"].tokens == ()
    assert bench.output.sampled["good"].tokens == (int(expected),)
    assert bench.output.sampled["good"].finish is None
    # The page serves its next owner as if nothing had been.
    bench.run(row(good, 0, 70, [2, 3]))
    assert bench.output.sampled["r"].tokens == (int(expected),)


@pytest.mark.parametrize("token", [-1, 97])
def test_unknown_token_is_refused_before_the_device_sees_it(token: int) -> None:
    bench = Bench(decoder(oracle("llama")))
    with pytest.raises(ValueError, match=rf"token {token} is not in the model's vocabulary of 97"):
        bench.run(row([3, token], 0, 2, [0]))


def test_step_without_rows() -> None:
    bench = Bench(decoder(oracle("llama")))
    output = bench.runner.run(ScheduledBatch(step=9, rows=()))
    assert (output.step, output.sampled, output.transfers_done, output.transfers_pending) == (9, {}, (), 0)


@pytest.mark.parametrize("device", DEVICES)
def test_offloaded_prefix_gives_the_same_answer(device: torch.device) -> None:
    """Compute, store, lose, restore to other pages, go on: the tokens of a run that lost nothing."""
    model = decoder(oracle("qwen3"), device)
    ids = random_ids(130, seed=4)
    cold = Bench(model)
    expected = cold.run(row(ids, 0, 130, [0, 1, 2]))

    bench = Bench(model)
    bench.run(row(ids, 0, 128, [6, 4], samples=False))
    size = bench.pages.page_bytes
    store = arena(2 * size)
    places = ((Extent(0, size),), (Extent(size, size),))
    stores = tuple(Transfer(n, "store", page, store, places[n]) for n, page in enumerate([6, 4]))
    # Stores run beside another request's step.
    other = random_ids(10, seed=5)
    bench.run(row(other, 0, 10, [9], "other"), transfers=stores)
    assert finish(bench) == [0, 1]
    bench.pages.tensor[: bench.pages.count] = 0xFF  # NaNs
    loads = tuple(Transfer(2 + n, "load", page, store, places[n]) for n, page in enumerate([11, 3]))
    bench.run(row(other, 0, 10, [9], "other"), transfers=loads)
    assert finish(bench) == [2, 3]
    logits = bench.run(row(ids, 128, 130, [11, 3, 8]))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    bench.runner.close()


def finish(bench: Bench) -> list[int]:
    """Steps without rows until no transfer is pending; all ids that were done since the last step."""
    done = list(bench.output.transfers_done)
    while bench.output.transfers_pending:
        bench.output = bench.runner.run(ScheduledBatch(bench.output.step + 1, ()))
        done += bench.output.transfers_done
    return sorted(done)
