"""The decoder through the runner, against transformers' classes with the same weights, in float32."""

from typing import Any

import pytest
import torch

from tests.devices import DEVICES
from tests.engine.tiny_models import CLASSES, Bench, decoder, oracle, oracle_logits, random_ids, row

CLOSE = {"atol": 1e-4, "rtol": 0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("architecture", CLASSES)
def test_prefill_in_chunks_then_decode(architecture: str, device: torch.device) -> None:
    model = oracle(architecture)
    bench = Bench(decoder(model, device))
    ids = random_ids(150, seed=1)
    expected = oracle_logits(model, ids)
    pages = [7, 2, 19]  # neither ascending nor neighbours
    start = 0
    # One token, up to just before a page's end, over it, exactly to one, single tokens behind it.
    for size in (1, 62, 2, 63, 1, 1, 17, 1, 1, 1):
        logits = bench.run(row(ids, start, start + size, pages))
        start += size
        torch.testing.assert_close(logits[0], expected[start - 1], **CLOSE)
        assert bench.output.sampled["r"].tokens == (int(expected[start - 1].argmax()),)
    assert start == len(ids)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"rope_parameters": LLAMA3_ROPE}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5_000.0}}),
        ("llama", {"num_key_value_heads": 6, "head_dim": 16}),
        ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_variants(architecture: str, changes: dict[str, Any]) -> None:
    model = oracle(architecture, **changes)
    ids = random_ids(200, seed=2)
    logits = Bench(decoder(model)).run(row(ids, 0, 200, [0, 1, 2, 3]))
    torch.testing.assert_close(logits[0], oracle_logits(model, ids)[-1], **CLOSE)


@pytest.mark.parametrize("device", DEVICES)
def test_mixed_batch(device: torch.device) -> None:
    """Prefill, the middle of a prefill, and decodes of very different lengths in one step."""
    model = oracle("qwen3")
    bench = Bench(decoder(model, device))
    a, b, c, d, e = (random_ids(count, seed) for seed, count in enumerate((300, 5, 130, 40, 70)))
    pages = {"a": [31, 30, 3, 4, 5], "b": [8], "c": [20, 10, 0], "d": [1], "e": [2, 6]}
    bench.run(row(a, 0, 299, pages["a"], samples=False), row(b, 0, 4, pages["b"], samples=False))
    bench.run(row(c, 0, 100, pages["c"], samples=False))
    logits = bench.run(
        row(a, 299, 300, pages["a"], "a"),
        row(e, 0, 69, pages["e"], "e", samples=False),
        row(b, 4, 5, pages["b"], "b"),
        row(c, 100, 130, pages["c"], "c"),
        row(d, 0, 40, pages["d"], "d"),
    )
    assert list(bench.output.sampled) == ["a", "b", "c", "d"]
    for got, ids in zip(logits, (a, b, c, d), strict=True):
        torch.testing.assert_close(got, oracle_logits(model, ids)[-1], **CLOSE)
    logits = bench.run(row(e, 69, 70, pages["e"], "e"))
    torch.testing.assert_close(logits[0], oracle_logits(model, e)[-1], **CLOSE)


@pytest.mark.parametrize("device", DEVICES)
def test_shared_prefix_is_read_and_not_written(device: torch.device) -> None:
    model = oracle("llama")
    bench = Bench(decoder(model, device))
    ids = random_ids(128, seed=3)
    first = bench.run(row(ids, 0, 128, [4, 9]))
    before = bench.pages.tensor.clone()
    # An exact repeat: the last token again, for its logits only.
    again = bench.run(row(ids, 127, 128, [4, 9], write_from=128))
    torch.testing.assert_close(again, first, **CLOSE)
    assert torch.equal(bench.pages.tensor, before)
    # A whole page is run again, from its first token on.
    bench.run(row(ids, 64, 128, [4, 9], write_from=128))
    assert torch.equal(bench.pages.tensor, before)
    # Half of what runs is written: positions 100 to 127 belong to somebody else as well.
    longer = [*ids, *random_ids(30, seed=4)]
    logits = bench.run(row(longer, 100, 158, [4, 9, 5], write_from=128))
    torch.testing.assert_close(logits[0], oracle_logits(model, longer)[-1], **CLOSE)
    assert torch.equal(bench.pages.tensor[[4, 9]], before[[4, 9]])


@pytest.mark.parametrize("device", DEVICES)
def test_whatever_a_page_held_before_does_not_matter(device: torch.device) -> None:
    """Pages of an ended request whose values had overflowed are given to another one."""
    model = oracle("qwen2")
    bench = Bench(decoder(model, device), pages=6)
    bench.pages.tensor[: bench.pages.count] = 0xFF  # NaNs
    short, long = random_ids(10, seed=5), random_ids(70, seed=6)
    bench.run(row(short, 0, 9, [0], "short", samples=False), row(long, 0, 69, [5, 3], "long", samples=False))
    logits = bench.run(row(short, 9, 10, [0], "short"), row(long, 69, 70, [5, 3], "long"))
    torch.testing.assert_close(logits[0], oracle_logits(model, short)[-1], **CLOSE)
    torch.testing.assert_close(logits[1], oracle_logits(model, long)[-1], **CLOSE)


def test_long_prefill_runs_in_query_tiles() -> None:
    model = oracle("llama", max_position_embeddings=2048, num_hidden_layers=1)
    ids = random_ids(1300, seed=7)
    bench = Bench(decoder(model))
    bench.run(row(ids, 0, 130, range(21), samples=False))
    logits = bench.run(row(ids, 130, 1300, range(21)))
    torch.testing.assert_close(logits[0], oracle_logits(model, ids)[-1], **CLOSE)
