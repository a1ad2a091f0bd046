"""What the judges are asked about on a GPU: the model that says words, and which side of a limit is the right one."""

from pathlib import Path

import pytest
import torch

from bench import engine, random_checkpoint
from bench.judges import checkpoint, client, missed
from bench.judges.scales import SCALES
from bench.results import Entry
from services.engine.config import EngineConfig
from services.engine.weights.loader import load_model
from tests.engine.test_packed_model import greedy


def test_random_model_says_words_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in engine.TINY.items():
        monkeypatch.setitem(random_checkpoint.TEXT, key, value)
    monkeypatch.setitem(random_checkpoint.TEXT, "vocab_size", 8192)  # more than the tokenizer knows, as the 27B's
    monkeypatch.setitem(random_checkpoint.TEXT, "max_position_embeddings", 512)
    monkeypatch.setattr(checkpoint, "SHARES", 1)
    folder = tmp_path / "model"
    folder.mkdir()
    checkpoint.write_share(folder, 4, torch.device("cpu"), 0)
    random_checkpoint.write_text_side(folder, 4, {"quantization_config": checkpoint.QUANTIZED})
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32")
    with torch.inference_mode():
        model = load_model(config, lambda share, what: None)
        said, _ = greedy(model, [[5, 6, 7], [300, 4, 90, 4000]], 12)
    words = set(checkpoint.word_ids())
    assert len(words) > 1000
    assert {token for row in said for token in row} <= words


@pytest.mark.parametrize(
    ("name", "value", "limit", "wrong"),
    [
        ("cache-pressure/retained", 64, 65, True),
        ("cache-pressure/retained", 65, 65, False),
        ("restore/8K/ms", 15.1, 15.0, True),
        ("restore/8K/ms", 14.9, 15.0, False),
        ("abort-prefill/read-twice", 256, 256, False),
        ("restore/8K/decode-loss", 0.11, 0.1, True),
        ("agent-sim/seconds", 1e9, None, False),
    ],
)
def test_limits_have_a_right_side(name: str, value: float, limit: float | None, wrong: bool) -> None:
    assert missed(Entry(name, value, "", limit=limit)) is wrong


def test_contexts_share_no_block() -> None:
    one, other = client.text(512, "a 1"), client.text(512, "a 2")
    assert one == client.text(512, "a 1")
    assert one[:100] != other[:100]


def test_a_main_agent_fits_into_the_small_pool() -> None:
    for scale in SCALES.values():
        sizes = scale.agents
        longest = sizes.steps * (sizes.step + sizes.reply + 16) + sizes.finalize
        assert longest < scale.small_pool.pages * 64
        assert sizes.sessions * (sizes.steps * sizes.step + 2 * sizes.sub) > 2 * scale.pool.pages * 64 * 0.9
