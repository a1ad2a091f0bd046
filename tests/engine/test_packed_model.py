"""Models whose weights stay packed say what they say with the same weights decoded."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from kernels.linear.grouped.form import Grouped
from kernels.linear.quantized import FORMATS, Quantized
from kernels.linear.weight import Weight
from services.engine.cache.pages import KvPages
from services.engine.config import EngineConfig
from services.engine.model.config import ModelError
from services.engine.model.matrix import MatrixSlot
from services.engine.model.mtp import DraftRow, MtpHead, draft
from services.engine.weights import binding, recipes
from services.engine.weights.artifact.reader import ArtifactCheckpoint
from services.engine.weights.artifact.writer import Job
from services.engine.weights.fingerprint import content_hash
from services.engine.weights.loader import LoadedModel, load_checkpoint, load_model
from services.engine.weights.safetensors_checkpoint import SafetensorsCheckpoint
from services.engine.weights.source import GROUPED, QuantizedSource
from tests.engine.packed_source import EncodedSource, FormatOf
from tests.engine.test_hybrid_checkpoint import Tensors, change, mtp_tensors, save_hybrid
from tests.engine.test_safetensors import edit, save
from tests.engine.tiny_models import Bench, random_ids, row
from tests.engine.tiny_prompts import MODEL, prompts, tokenizer

PLAIN = ("norm", "conv1d", "A_log", "dt_bias", "bias", "in_proj_a", "in_proj_b", "mlp.gate.", "shared_expert_gate")
"""What no publisher quantizes, by a part of the name."""


def everywhere(format: str) -> FormatOf:
    return lambda name: "float32" if any(part in name for part in PLAIN) else format


def mixture(name: str) -> str:
    """Groups of several formats, and one of a single one beside plain rows."""
    formats = {
        "q_proj": "fp8",
        "k_proj": "fp8",
        "v_proj": "int4-g64",
        "o_proj": "nvfp4",
        "in_proj_qkv": GROUPED,
        "in_proj_z": "int8-g32",
        "out_proj": GROUPED,
        "gate_proj": "nvfp4",
        "up_proj": "float32",
        "down_proj": "int3-g128",
        "embed_tokens": "int6-g64",
        "lm_head": "int5-g64",
        "mtp.fc": "fp8-block",
        "experts.gate_up_proj": "nvfp4",
        "experts.down_proj": GROUPED,
    }
    found = [format for part, format in formats.items() if part in name]
    return found[-1] if found else "float32"


def load(source: QuantizedSource, weights: Literal["dense", "packed"]) -> LoadedModel:
    config = EngineConfig(device="cpu", dtype="float32", weights=weights)
    return load_checkpoint(source, "model", config, lambda share, what: None)


def both(folder: Path, format_of: FormatOf) -> tuple[LoadedModel, LoadedModel]:
    source = EncodedSource(SafetensorsCheckpoint(folder), format_of)
    return load(source, "dense"), load(source, "packed")


def greedy(loaded: LoadedModel, prompts: Sequence[Sequence[int]], limit: int) -> tuple[list[list[int]], Tensor]:
    """All rows in the same steps; and the logits of the first."""
    width = -(-(max(map(len, prompts)) + limit) // 64)
    bench = Bench(loaded.model, pages=width * len(prompts), states=len(prompts))
    ids = [list(prompt) for prompt in prompts]
    start = [0] * len(ids)
    first = torch.empty(0)
    for _ in range(limit):
        tables = [range(n * width, (n + 1) * width) for n in range(len(ids))]
        logits = bench.run(*(row(ids[n], start[n], len(ids[n]), tables[n], str(n), state=n) for n in range(len(ids))))
        first = first if len(first) else logits
        start = [len(each) for each in ids]
        for name, sampled in bench.output.sampled.items():
            ids[int(name)] += sampled.tokens
    return [each[len(prompt) :] for each, prompt in zip(ids, prompts, strict=True)], first


def assert_same_text(dense: LoadedModel, packed: LoadedModel, prompts: Sequence[Sequence[int]], limit: int) -> None:
    expected, logits = greedy(dense, prompts, limit)
    got, packed_logits = greedy(packed, prompts, limit)
    torch.testing.assert_close(packed_logits, logits, atol=1e-4, rtol=0)
    assert got == expected


def packed_names(loaded: LoadedModel) -> set[str]:
    slots = [*loaded.model.slots(), *(loaded.mtp.slots() if loaded.mtp is not None else ())]
    return {
        slot.name
        for slot in slots
        if isinstance(slot, MatrixSlot) and not any(isinstance(block, Tensor) for block in slot.matrix.blocks)
    }


def recipe(name: str) -> str:
    """Like `nvfp4-mixed`."""
    return everywhere("nvfp4" if "mlp" in name and "layers.7" not in name else "fp8")(name)


def test_trained_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head is the embedding; tensors come in pieces. (`python -m bench perplexity` runs it in every format.)"""
    monkeypatch.setattr(binding, "_PIECE", 2**16)
    dense, packed = both(MODEL, recipe)
    assert packed_names(dense) == set()
    assert len(packed_names(packed)) == 1 + 6 * 6 + 2 * 7 + 8  # embedding, 6 delta nets, 2 attentions, MTP head
    assert packed.fingerprint == dense.fingerprint
    rows = [tokenizer().encode(text).ids for text in prompts("tools", 2)]
    assert_same_text(dense, packed, rows, 3)


def test_gguf() -> None:
    """The default model, Q4_1 and Q8_0."""
    dense, packed = (
        load_model(EngineConfig(device="cpu", dtype="float32", weights=weights), lambda share, what: None)
        for weights in ("dense", "packed")
    )
    assert len(packed_names(packed)) == 1 + 30 * 7
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = Tokenizer.from_str(dense.bundle.tokenizer_json).encode(prompt, add_special_tokens=False).ids
    assert_same_text(dense, packed, [ids], 2)


@pytest.mark.parametrize("recipe_name", ["nvfp4-mixed", "keep"])
def test_folders_of_ours(tmp_path: Path, recipe_name: str) -> None:
    """`keep` has what the source had, also plain rows in the group [gate, up]."""
    save_hybrid(tmp_path, "dense")
    source = EncodedSource(SafetensorsCheckpoint(tmp_path), mixture)
    out = tmp_path / "packed"
    job = Job(source, "model", content_hash(source), recipes.load(recipe_name), recipe_name, out, torch.device("cpu"))
    job.run(lambda share, what: None)
    dense, packed = (load(ArtifactCheckpoint(out), weights) for weights in ("dense", "packed"))
    whole = 2 + 3 * 3 + 4 + 4 * 3  # embedding and head, 3 delta nets, an attention, 4 MLPs
    assert len(packed_names(packed)) == (whole - 4 * 2 if recipe_name == "keep" else whole)
    assert_same_text(dense, packed, [random_ids(70, seed=1), random_ids(5, seed=2)], 3)


@pytest.mark.parametrize("format", [*FORMATS, GROUPED])
def test_every_format(tmp_path: Path, format: str) -> None:
    """A tied head; columns that fill no group."""
    save_hybrid(tmp_path, "dense-odd")
    dense, packed = both(tmp_path, everywhere(format))
    assert_same_text(dense, packed, [random_ids(70, seed=1), random_ids(5, seed=2)], 3)


@pytest.mark.parametrize("format", ["fp8-block", "nvfp4", GROUPED])
def test_experts(tmp_path: Path, format: str) -> None:
    save_hybrid(tmp_path, "moe")
    dense, packed = both(tmp_path, everywhere(format))
    assert_same_text(dense, packed, [random_ids(9, seed=1), random_ids(5, seed=2)], 2)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_dense_decoders(tmp_path: Path, architecture: str) -> None:
    """With and without biases, in groups of several formats."""
    save(tmp_path, architecture)
    dense, packed = both(tmp_path, mixture)
    assert {name.split(".")[-2] for name in packed_names(packed)} == {
        "embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "down_proj",
    }  # fmt: skip
    assert_same_text(dense, packed, [random_ids(70, seed=1), random_ids(5, seed=2)], 3)


@pytest.mark.parametrize("shape", ["dense", "moe"])
def test_mixed_groups_and_drafts(tmp_path: Path, shape: str) -> None:
    """Each part of a group in another format, the draft head too."""
    model = save_hybrid(tmp_path, shape)
    if shape == "dense":
        edit(tmp_path / "config.json", mtp_num_hidden_layers=1)
        head = {n: torch.randn(t.shape, generator=torch.Generator().manual_seed(3)) * 0.15
                for n, t in mtp_tensors(model).items()}  # fmt: skip
        change(tmp_path, lambda tensors: {**tensors, **head})
    dense, packed = both(tmp_path, lambda name: "float32" if any(part in name for part in PLAIN) else mixture(name))
    slots = {slot.name: slot for slot in packed.model.slots()}
    qkv = slots["model.layers.3.self_attn.q_proj.weight"]
    assert isinstance(qkv, MatrixSlot)
    assert [(b.format, b.rows) for b in qkv.matrix.blocks if isinstance(b, Weight)] == [
        ("fp8", 224),
        ("int4-g64", 32),
    ]
    assert_same_text(dense, packed, [random_ids(70, seed=1), random_ids(5, seed=2)], 3)
    if shape == "dense":
        assert dense.mtp is not None
        assert packed.mtp is not None
        assert {name for name in packed_names(packed) if name.startswith("mtp.")} > {"mtp.fc.weight"}
        hidden = torch.randn(9, 48, generator=torch.Generator().manual_seed(4))
        assert torch.equal(drafts(dense.mtp, hidden), drafts(packed.mtp, hidden))


def drafts(head: MtpHead, hidden: Tensor) -> Tensor:
    with torch.inference_mode():
        pages = KvPages(head.kv_layout, 1, torch.device("cpu"))
        return draft(head, pages, [DraftRow(0, hidden, random_ids(len(hidden), seed=5), [0])], 4)


def one_by_one(tensors: Tensors) -> Tensors:
    """The experts of a file of transformers as other tools store them."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        for expert, matrix in enumerate(tensor if last in ("gate_up_proj", "down_proj") else ()):
            if last == "gate_up_proj":
                result[f"{stem}.{expert}.gate_proj.weight"], result[f"{stem}.{expert}.up_proj.weight"] = matrix.chunk(2)
            else:
                result[f"{stem}.{expert}.down_proj.weight"] = matrix
        if last not in ("gate_up_proj", "down_proj"):
            result[name] = tensor
    return result


def test_experts_one_by_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_hybrid(tmp_path, "moe")
    change(tmp_path, one_by_one)
    odd = "model.layers.1.mlp.experts.5.up_proj.weight"
    with caplog.at_level(logging.INFO):
        dense, packed = both(tmp_path, lambda name: "fp8" if name == odd else everywhere("nvfp4")(name))
    experts = {name for name in packed_names(packed) if "mlp.experts" in name}
    # One expert of another format: its layer's matrix is decoded, as experts lie in one.
    parts = {f"model.layers.{layer}.mlp.experts.{part}" for layer in range(4) for part in ("gate_up_proj", "down_proj")}
    assert experts == parts - {"model.layers.1.mlp.experts.gate_up_proj"}
    assert "are of several formats" in caplog.text
    assert_same_text(dense, packed, [random_ids(20, seed=1)], 1)


class Spoiled(EncodedSource):
    """Gives one value that is no number."""

    def encoded(self, name: str, first: int, last: int) -> Quantized | Grouped:
        natural = super().encoded(name, first, last)
        assert isinstance(natural, Quantized)
        if "layers.2.mlp.down_proj" not in name:
            return natural
        codes, scales, row_scale = natural.codes.clone(), natural.scales, natural.row_scale
        if natural.format == "fp8":
            codes[3, 4] = 0xFF
        elif natural.format == "nvfp4":
            assert row_scale is not None
            row_scale = torch.where(torch.arange(len(row_scale)) == 3, torch.inf, row_scale)
        else:
            assert scales is not None
            scales = scales.clone()
            scales[3] = torch.nan
        return Quantized(natural.format, codes, scales, row_scale)


@pytest.mark.parametrize("format", ["fp8", "nvfp4", "int4-g64"])
def test_values_that_are_not_finite(tmp_path: Path, format: str) -> None:
    save_hybrid(tmp_path)
    source = Spoiled(SafetensorsCheckpoint(tmp_path), everywhere(format))
    with pytest.raises(ModelError, match=r"layers\.2\.mlp\.down_proj\.weight .*holds values that are not finite"):
        load(source, "packed")


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    save_hybrid(tmp_path)
    name = "model.layers.2.mlp.down_proj.weight"
    change(tmp_path, lambda tensors: {**tensors, name: torch.ones(48, 79)})
    with pytest.raises(ModelError, match=r"down_proj\.weight .*has the shape .48, 79.; expected .48, 80."):
        load(EncodedSource(SafetensorsCheckpoint(tmp_path), everywhere("fp8")), "packed")
    change(tmp_path, lambda tensors: {n: t for n, t in tensors.items() if n != name})
    with pytest.raises(ModelError, match=r"down_proj\.weight is missing; expected with shape .48, 80."):
        load(EncodedSource(SafetensorsCheckpoint(tmp_path), everywhere("fp8")), "packed")
