"""Folders as transformers writes them, with one file or several."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from services.engine.config import EngineConfig
from services.engine.model.config import ModelError
from services.engine.weights import fingerprint as fingerprint_module
from services.engine.weights.fingerprint import fingerprint
from services.engine.weights.loader import LoadedModel, load_model
from services.engine.weights.safetensors_checkpoint import SafetensorsCheckpoint
from tests.engine.tiny_models import CLASSES, Bench, oracle, oracle_logits, random_ids, row


def load(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), device="cpu", **settings), lambda share, what: None)


def save(folder: Path, architecture: str = "llama", shards: str = "1GB", **changes: Any) -> Any:
    model = oracle(architecture, **changes)
    model.save_pretrained(folder, max_shard_size=shards)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def edit(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**value, **changes}))


@pytest.mark.parametrize("architecture", CLASSES)
@pytest.mark.parametrize("shards", ["1GB", "40KB"])
def test_same_model(tmp_path: Path, architecture: str, shards: str) -> None:
    model = save(tmp_path, architecture, shards)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 2) == (shards == "40KB")
    loaded = load(tmp_path)
    assert (loaded.name, loaded.context_length) == (tmp_path.name, 512)
    ids = random_ids(80, seed=1)
    logits = Bench(loaded.model).run(row(ids, 0, 80, [1, 0]))
    torch.testing.assert_close(logits[0], oracle_logits(model, ids)[-1], atol=1e-4, rtol=0)


def test_tied_head_and_half_precision_files(tmp_path: Path) -> None:
    model = save(tmp_path, "qwen2", tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    halves = {name: value.to(torch.bfloat16) for name, value in load_file(path).items()}
    # A tied head that is stored nevertheless, and what old checkpoints hold.
    halves["lm_head.weight"] = halves["model.embed_tokens.weight"].clone()
    halves["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(halves, path)
    ids = random_ids(30, seed=2)
    logits = Bench(load(tmp_path).model).run(row(ids, 0, 30, [0]))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(torch.bfloat16))
    expected = oracle_logits(model, ids)[-1]
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported; known: llama, qwen2, qwen3"),
        ({"model_type": None}, "model_type is None; expected text"),
        ({"hidden_size": "48"}, "hidden_size is '48'; expected a whole number"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters.rope_type = 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope_scaling.rope_type = 'dynamic'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters of type 'linear' has no 'factor'"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"num_key_value_heads": 4}, "6 query heads cannot share 4"),
        ({"num_hidden_layers": 0}, "layers is 0"),
        ({"head_dim": 7}, "head_dim is 7"),
    ],
)
def test_config_that_cannot_be_honoured(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save(tmp_path)
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(ModelError, match=rf"config\.json: .*{message}"):
        load(tmp_path)


def test_older_configs(tmp_path: Path) -> None:
    """rope_theta and rope_scaling of transformers 4; a window that is switched off or never reached."""
    model = save(tmp_path)
    changes = {"rope_parameters": None, "rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    edit(tmp_path / "config.json", **changes, sliding_window=64, use_sliding_window=False)
    assert load(tmp_path).model_config.rope.theta == 777.0
    assert load(tmp_path).model_config.rope.divisors == (2.0,) * 4
    edit(tmp_path / "config.json", sliding_window=512, use_sliding_window=True)
    assert load(tmp_path).model_config.head_dim == model.config.head_dim


def test_broken_files(tmp_path: Path) -> None:
    save(tmp_path, shards="40KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    with pytest.raises(ModelError, match=rf"{shard.name} is no whole safetensors file"):
        load(tmp_path)
    shard.write_bytes(b"")
    with pytest.raises(ModelError, match=rf"{shard.name} is no whole safetensors file"):
        load(tmp_path)
    shard.unlink()
    with pytest.raises(ModelError, match=rf"{shard.name} is missing, but model\.safetensors\.index\.json names it"):
        load(tmp_path)
    for path in tmp_path.glob("model*"):
        path.unlink()
    with pytest.raises(ModelError, match=r"holds no \*\.safetensors"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, "is missing; expected with shape .80, 48."),
        ("lm_head.weight", None, "is missing"),
        ("model.norm.weight", torch.ones(47), r"of model\.safetensors has the shape .47.; expected .48."),
        ("model.norm.weight", torch.ones(48, dtype=torch.float64), "has the type F64; supported: F32, F16, BF16"),
        ("model.layers.0.mlp.up_proj.lora", torch.ones(3), "is not part of a llama decoder"),
    ],
)
def test_tensor_that_does_not_fit(tmp_path: Path, name: str, value: torch.Tensor | None, message: str) -> None:
    save(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(name, None)
    save_file({**tensors, **({} if value is None else {name: value})}, path)
    with pytest.raises(ModelError, match=rf"tensor {name}.*{message}"):
        load(tmp_path)


def test_fingerprint_of_large_files_notices_each_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled (as above 1 GiB): header, and start, middle and end of every tensor."""
    monkeypatch.setattr(fingerprint_module, "_SAMPLE", 64)
    save(tmp_path, shards="60KB")

    def name() -> str:
        return fingerprint(SafetensorsCheckpoint(tmp_path), torch.float32, whole_up_to=0)

    seen = {name()}
    assert name() in seen
    assert fingerprint(SafetensorsCheckpoint(tmp_path), torch.float32) not in seen
    for path in sorted(tmp_path.glob("*.safetensors")):
        tensors = load_file(path)
        for key, tensor in tensors.items():
            for index in (0, tensor.numel() // 2, -1):
                tensor.view(-1)[index] += 1
                save_file(tensors, path, metadata={"format": "pt"})
                assert name() not in seen, (key, index)
                seen.add(name())


def test_text_side(tmp_path: Path) -> None:
    save(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    added = [("<s>", 3, True), ("<|im_end|>", 4, True), ("<think>", 5, False), ("</s>", 6, True), ("<tool>", 7, True)]
    edit(
        tmp_path / "tokenizer.json",
        added_tokens=[
            {"id": n, "content": c, "special": s, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False}
            for c, n, s in added
        ],
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [3], "tokens": ["<s>"]}},
        },
    )  # fmt: skip
    edit(
        tmp_path / "tokenizer_config.json",
        bos_token={"content": "<s>"},
        eos_token="</s>",
        chat_template=[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
    )
    edit(tmp_path / "generation_config.json", eos_token_id=[6, 7], temperature=0.6, top_k=20, do_sample=True)
    edit(tmp_path / "config.json", eos_token_id=6)
    bundle = load(tmp_path).bundle
    assert Tokenizer.from_str(bundle.tokenizer_json).get_vocab_size() == 8
    assert bundle.chat_template == "D"
    assert (bundle.special.bos_id, bundle.special.add_bos) == (3, True)
    assert bundle.special.stop_ids == (4, 6, 7)
    assert bundle.special.tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert bundle.generation_defaults == {"temperature": 0.6, "top_k": 20.0}

    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    edit(tmp_path / "tokenizer_config.json", add_bos_token=False)
    edit(tmp_path / "generation_config.json", do_sample=False)
    bundle = load(tmp_path).bundle
    assert (bundle.chat_template, bundle.special.add_bos) == ("{{ messages }}", False)
    assert bundle.generation_defaults == {"temperature": 0.0, "top_k": 20.0}

    # Nothing but the tokenizer: no template, no special token that anybody named.
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("chat_template.jinja", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).unlink()
    edit(tmp_path / "config.json", eos_token_id=None)
    bundle = load(tmp_path).bundle
    assert (bundle.chat_template, bundle.special.stop_ids, bundle.generation_defaults) == ("", (), {})

    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        load(tmp_path)
