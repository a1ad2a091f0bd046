"""The hybrid decoder through the runner, against transformers' classes with the same weights."""

import pytest
import torch
from torch.nn.functional import kl_div

from kernels.gated_delta import flash
from services.engine.batch import Copy, Row, SampleSpec
from tests.devices import DEVICES
from tests.engine.hybrid_models import SHAPES, hybrid_oracle
from tests.engine.tiny_models import GREEDY, Bench, decoder, oracle_logits, random_ids, row

CLOSE = {"atol": 1e-3, "rtol": 0}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_in_chunks_then_decode(shape: str, device: torch.device) -> None:
    model = hybrid_oracle(shape)
    bench = Bench(decoder(model, device))
    ids = random_ids(330, seed=1)
    expected = oracle_logits(model, ids)
    pages = [7, 2, 19, 3, 30, 11]  # neither ascending nor neighbours
    start = 0
    # One token, up to just before a page's end, over it, exactly to one, single tokens, two of the rule's chunks and
    # a rest, fewer tokens than the convolution is wide.
    for size in (1, 62, 2, 63, 1, 1, 17, 1, 150, 2, 3, 1, 1, 25):
        logits = bench.run(row(ids, start, start + size, pages, state=5))
        start += size
        torch.testing.assert_close(logits[0].cpu(), expected[start - 1], **CLOSE)
        assert bench.output.sampled["r"].tokens == (int(expected[start - 1].argmax()),)
    assert start == len(ids)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_batch(shape: str, device: torch.device) -> None:
    """Prefill, the middle of a prefill, and decodes of very different lengths in one step."""
    model = hybrid_oracle(shape)
    bench = Bench(decoder(model, device))
    a, b, c, d, e = (random_ids(count, seed) for seed, count in enumerate((300, 5, 130, 40, 70)))
    pages = {"a": [31, 30, 3, 4, 5], "b": [8], "c": [20, 10, 0], "d": [1], "e": [2, 6]}
    bench.run(
        row(a, 0, 299, pages["a"], "a", samples=False, state=15), row(b, 0, 4, pages["b"], "b", samples=False, state=0)
    )
    bench.run(row(c, 0, 100, pages["c"], "c", samples=False, state=3))
    logits = bench.run(
        row(a, 299, 300, pages["a"], "a", state=15),
        row(e, 0, 69, pages["e"], "e", samples=False, state=4),
        row(b, 4, 5, pages["b"], "b", state=0),
        row(c, 100, 130, pages["c"], "c", state=3),
        row(d, 0, 40, pages["d"], "d", state=9),
    )
    assert list(bench.output.sampled) == ["a", "b", "c", "d"]
    for got, ids in zip(logits, (a, b, c, d), strict=True):
        torch.testing.assert_close(got, oracle_logits(model, ids)[-1], **CLOSE)
    logits = bench.run(row(e, 69, 70, pages["e"], "e", state=4))
    torch.testing.assert_close(logits[0], oracle_logits(model, e)[-1], **CLOSE)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16(shape: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same weights, rounded, computed in float32. (flash-linear-attention would tune itself for each of
    these shapes, a minute each; test_qwen3_5_large.py runs it at the family's.)"""
    monkeypatch.setattr(flash, "usable", lambda q: False)
    model = hybrid_oracle(shape)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.5).copy_(weight.to(torch.bfloat16))
    ids = random_ids(200, seed=2)
    expected = oracle_logits(model, ids).log_softmax(-1)
    bench = Bench(decoder(model, device, torch.bfloat16))
    got = []
    for start, end in ((0, 100), (100, 163), *((n, n + 1) for n in range(163, 200))):
        got.append(bench.run(row(ids, start, end, [0, 1, 2, 3], state=0))[0].log_softmax(-1))
    ends = [99, 162, *range(163, 200)]
    divergence = kl_div(torch.stack(got), expected[ends], log_target=True, reduction="batchmean")
    assert 0 <= divergence <= 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_whatever_a_slot_held_before_does_not_matter(device: torch.device) -> None:
    model = hybrid_oracle("dense")
    bench = Bench(decoder(model, device))
    assert bench.states is not None
    bench.states.tensor.fill_(0xFF)  # NaNs
    bench.pages.tensor[: bench.pages.count] = 0xFF  # NaNs
    ids, other = random_ids(80, seed=3), random_ids(70, seed=4)
    logits = bench.run(row(ids, 0, 80, [5, 3], state=2), row(other, 0, 70, [1, 2], "o", state=7))
    torch.testing.assert_close(logits[0], oracle_logits(model, ids)[-1], **CLOSE)
    torch.testing.assert_close(logits[1], oracle_logits(model, other)[-1], **CLOSE)
    untouched = [slot for slot in range(bench.states.count) if slot not in (2, 7)]
    assert bool((bench.states.tensor[untouched] == 0xFF).all())


@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_repeats_and_forks(device: torch.device) -> None:
    """Taken inside a page at the end of a chunk; an exact repeat computes nothing, two others go on from it."""
    model = hybrid_oracle("dense")
    bench = Bench(decoder(model, device))
    prefix = random_ids(90, seed=5)
    first = bench.run(
        row(prefix, 0, 90, [0, 1], state=0),
        after=(Copy("state", 0, 9), Copy("page", 1, 20)),
    ).clone()
    # The request itself goes on, in its own page and slot.
    longer = [*prefix, *random_ids(40, seed=6)]
    expected = bench.run(row(longer, 90, 130, [0, 1, 2], state=0)).clone()

    empty = Row("r", (), 90, [0, 3], 90, SampleSpec(GREEDY, prefix, []), 4)
    resume = (Copy("state", 9, 4), Copy("page", 20, 3))
    assert torch.equal(bench.run(empty, before=resume), first)
    # It was split at the same place: the same bits, in other pages and another slot.
    assert torch.equal(bench.run(row(longer, 90, 130, [0, 3, 4], state=4)), expected)
    torch.testing.assert_close(expected[0], oracle_logits(model, longer)[-1], **CLOSE)

    # Another continuation beside an exact repeat, both from the same checkpoint.
    fork = [*prefix, *random_ids(7, seed=7)]
    logits = bench.run(
        row(fork, 90, 97, [0, 5], "fork", state=6),
        Row("again", (), 90, [0, 6], 90, SampleSpec(GREEDY, prefix, []), 7),
        before=(Copy("state", 9, 6), Copy("page", 20, 5), Copy("state", 9, 7), Copy("page", 20, 6)),
    )
    torch.testing.assert_close(logits[0], oracle_logits(model, fork)[-1], **CLOSE)
    torch.testing.assert_close(logits[1:], first, atol=1e-5, rtol=0)


def test_rows_without_a_slot_are_refused() -> None:
    bench = Bench(decoder(hybrid_oracle("dense")), states=4)
    for state in (-1, 4):
        with pytest.raises(IndexError, match=rf"state {state} of 4"):
            bench.run(row([1, 2], 0, 2, [0], state=state))
    with pytest.raises(IndexError, match="state 4 of 4"):
        bench.run(row([1, 2], 0, 2, [0], state=0), after=(Copy("state", 0, 4),))
