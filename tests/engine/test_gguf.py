"""Models in GGUF: written with the gguf package, read by ours, compared with transformers."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from services.engine.config import EngineConfig
from services.engine.model.config import ModelError
from services.engine.weights import gguf_checkpoint
from services.engine.weights.gguf_file import GgufFile
from services.engine.weights.loader import load_model
from tests.engine import gguf_files
from tests.engine.tiny_models import CLASSES, Bench, oracle, oracle_logits, random_ids, row


def load(path: Path, **settings: Any) -> Any:
    return load_model(EngineConfig(model=str(path), device="cpu", **settings), lambda share, what: None)


def assert_same_model(path: Path, model: Any, atol: float = 1e-4) -> None:
    ids = random_ids(80, seed=1)
    logits = Bench(load(path).model).run(row(ids, 0, 80, [1, 0]))
    torch.testing.assert_close(logits[0], oracle_logits(model, ids)[-1], atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        *((architecture, {}) for architecture in CLASSES),
        ("llama", {"attention_bias": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_float32(tmp_path: Path, architecture: str, changes: dict[str, Any]) -> None:
    model = oracle(architecture, **changes)
    assert_same_model(gguf_files.write(tmp_path / "m.gguf", model), model)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1])
def test_other_types(tmp_path: Path, kind: Kind) -> None:
    model = oracle("llama", hidden_size=64, intermediate_size=96, head_dim=16, num_attention_heads=4)
    path = gguf_files.write(tmp_path / "m.gguf", model, kind)
    assert_same_model(path, gguf_files.dequantized(path, model))


def test_decoded_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded memory: pieces of a few rows, smaller than a head of q and k whose rows change places."""
    monkeypatch.setattr(gguf_checkpoint, "_CHUNK_ELEMENTS", 500)
    model = oracle("llama", head_dim=16)
    assert_same_model(gguf_files.write(tmp_path / "m.gguf", model), model)


def test_rope_scaling(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    model = oracle("llama", rope_parameters=linear)
    entries = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert_same_model(gguf_files.write(tmp_path / "linear.gguf", model, metadata=entries), model)

    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = oracle("llama", rope_parameters=llama3)
    # As the converter computes rope_freqs.weight (Llama 3.1's formula).
    factors = []
    for frequency in 10_000.0 ** -(np.arange(0, 8, 2) / 8):
        wavelength = 2 * np.pi / frequency
        if wavelength < 64 / 4.0:
            factors.append(1.0)
        elif wavelength > 64 / 1.0:
            factors.append(8.0)
        else:
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    assert len(set(factors)) > 2
    extra = {"rope_freqs.weight": np.array(factors, dtype=np.float32)}
    assert_same_model(gguf_files.write(tmp_path / "llama3.gguf", model, replaced=extra), model)


def test_names_and_limits(tmp_path: Path) -> None:
    model = oracle("llama")
    loaded = load(gguf_files.write(tmp_path / "Tiny-7B-UD-Q4_K_M.gguf", model))
    assert loaded.name == "Tiny-7B"
    assert loaded.context_length == 512
    assert load(tmp_path / "Tiny-7B-UD-Q4_K_M.gguf", model_name="mine").name == "mine"
    assert load(tmp_path / "Tiny-7B-UD-Q4_K_M.gguf", dtype="bfloat16").model.dtype == torch.bfloat16


def test_progress_rises_to_one(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "m.gguf", oracle("llama"))
    seen: list[tuple[float, str]] = []
    load_model(EngineConfig(model=str(path), device="cpu"), lambda share, what: seen.append((share, what)))
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert len(seen) > 20


def test_fingerprint(tmp_path: Path) -> None:
    """Equal for the same content anywhere; another one for any change that makes KV differ."""
    model = oracle("llama")
    path = gguf_files.write(tmp_path / "a.gguf", model)
    name = load(path).fingerprint
    assert load(path.rename(tmp_path / "b.gguf")).fingerprint == name
    assert load(tmp_path / "b.gguf", dtype="bfloat16").fingerprint != name
    data = bytearray((tmp_path / "b.gguf").read_bytes())
    data[-5] ^= 1
    (tmp_path / "c.gguf").write_bytes(data)
    assert load(tmp_path / "c.gguf").fingerprint != name
    other = gguf_files.write(tmp_path / "d.gguf", model, metadata={"llama.rope.freq_base": 9_999.0})
    assert load(other).fingerprint != name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"architecture": "mamba"},
            r"general.architecture 'mamba' is not supported; known: llama, qwen2, qwen3, qwen35, qwen35moe",
        ),
        ({"without": ["blk.1.ffn_up.weight"]}, r"tensor blk\.1\.ffn_up\.weight is missing.*\[80, 48\]"),
        ({"without": ["token_embd.weight"]}, r"tensor token_embd\.weight is missing"),
        (
            {"replaced": {"blk.2.attn_k.weight": np.zeros((16, 40), np.float32)}},
            r"tensor blk\.2\.attn_k\.weight has the shape \[16, 40\]; expected \[16, 48\]",
        ),
        (
            {"replaced": {"blk.2.attn_norm.weight": np.zeros((2, 48), np.float32)}},
            r"tensor blk\.2\.attn_norm\.weight has the shape \[2, 48\]; expected \[48\]",
        ),
        (
            {"replaced": {"blk.0.ffn_gate_inp.weight": np.zeros((4, 48), np.float32)}},
            r"tensor blk\.0\.ffn_gate_inp\.weight is not part of a llama decoder",
        ),
        ({"replaced": {"rope_freqs.weight": np.ones(3, np.float32)}}, r"rope_freqs\.weight has the shape \[3\]"),
        (
            {"replaced": {"output.weight": np.zeros((97, 48), np.int32)}},
            r"tensor output\.weight has the type I32, which cannot be read",
        ),
        ({"metadata": {"llama.attention.head_count": None}}, r"llama\.attention\.head_count is missing"),
        ({"metadata": {"llama.attention.head_count": [6, 6, 4]}}, r"llama\.attention\.head_count is \[6, 6, 4\]"),
        ({"metadata": {"llama.expert_count": 8}}, r"llama\.expert_count = 8 is not supported"),
        ({"metadata": {"llama.attention.sliding_window": 128}}, r"llama\.attention\.sliding_window = 128"),
        ({"metadata": {"llama.rope.dimension_count": 4}}, r"llama\.rope\.dimension_count is 4"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, r"llama\.rope\.scaling\.type = 'yarn'"),
        ({"metadata": {"llama.attention.head_count_kv": 4}}, r"6 query heads cannot share 4"),
        ({"metadata": {"split.count": 3}}, r"part of a split model of 3 files"),
        ({"metadata": {"tokenizer.ggml.tokens": None}}, r"tokenizer\.ggml\.tokens is missing"),
        ({"metadata": {"tokenizer.ggml.pre": "viking"}}, r"tokenizer\.ggml\.pre 'viking' is not supported"),
        ({"metadata": {"tokenizer.ggml.model": "rwkv"}}, r"tokenizer\.ggml\.model 'rwkv' is not supported"),
        ({"metadata": {"tokenizer.ggml.merges": None}}, r"tokenizer\.ggml\.merges is missing"),
        ({"metadata": {"tokenizer.ggml.token_type": [1, 1]}}, r"token_type has 2 entries for 97 tokens"),
    ],
)
def test_what_cannot_be_served(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = gguf_files.write(tmp_path / "model.gguf", oracle("llama"), **options)
    with pytest.raises(ModelError, match=r"model\.gguf.*" + message):
        load(path)


def test_truncated_anywhere(tmp_path: Path) -> None:
    """Never a crash of another kind, never a model; the message says truncated."""
    whole = gguf_files.write(tmp_path / "whole.gguf", oracle("llama")).read_bytes()
    header = GgufFile(tmp_path / "whole.gguf").header_bytes
    path = tmp_path / "cut.gguf"
    for size in [*range(5, header, 97), header - 1, header, header + 5000, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf.*truncated"):
            load(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(ModelError, match=rf"tensor \S+ should end at byte {len(whole)}, but .* {len(whole) - 1} bytes"):
        load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GG", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file: it starts with b'PK"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "version 1"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "version 50331648"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 0), "entry 1 of .*truncated"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**62), "truncated"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 4, 2**60), "metadata k.*truncated"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 77), "metadata k has the unknown value type 77"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 1, 0, 1, b"t", 9), "tensor t has 9 dims"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 32, 999, 0), "tensor t has the unknown type"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 31, 2, 0), "tensor t of shape .31. is not made"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 0), "general.architecture None is not supported"),
    ],
)
def test_no_or_damaged_gguf(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"x\.gguf.*" + message):
        load(path)
