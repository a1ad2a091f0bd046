"""Folders of the Qwen3.5 family: configs, names of tensors, and what is wrong with them."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.engine.config import EngineConfig, StateDtype
from services.engine.model.config import ModelError
from services.engine.model.hybrid_config import DeltaNetConfig, ExpertsConfig, HybridConfig, parse_hybrid_config
from services.engine.model.mtp import MtpHead
from services.engine.model.qwen3_5 import HybridDecoder
from services.engine.weights import fingerprint as fingerprint_module
from services.engine.weights.fingerprint import fingerprint
from services.engine.weights.loader import LoadedModel, load_model
from services.engine.weights.safetensors_checkpoint import SafetensorsCheckpoint
from tests.engine.hybrid_models import hybrid_oracle
from tests.engine.test_safetensors import edit, save
from tests.engine.tiny_models import Bench, decoder, oracle_logits, random_ids, row

Tensors = dict[str, Tensor]


def save_hybrid(folder: Path, shape: str = "dense", **changes: Any) -> Any:
    save(folder)  # for its tokenizer
    model = hybrid_oracle(shape, **changes)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return model


def load(folder: Path) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), device="cpu"), lambda share, what: None)


def change(folder: Path, how: Callable[[Tensors], Mapping[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    tensors = how(load_file(path))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def assert_same_model(folder: Path, model: Any) -> LoadedModel:
    loaded = load(folder)
    ids = random_ids(80, seed=1)
    logits = Bench(loaded.model).run(row(ids, 0, 80, [1, 0], state=3))
    torch.testing.assert_close(logits[0], oracle_logits(model, ids)[-1], atol=1e-4, rtol=0)
    return loaded


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("shape", ["dense", "moe"])
def test_prefixes_nested_config_and_vision(
    tmp_path: Path, shape: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_hybrid(tmp_path, shape)
    text = json.loads((tmp_path / "config.json").read_text())
    root = {"model_type": text["model_type"].removesuffix("_text"), "vision_config": {"depth": 27}}
    (tmp_path / "config.json").write_text(json.dumps({**root, "tie_word_embeddings": False, "text_config": text}))
    head = "language_model.lm_head.weight" if prefix.startswith("language_model") else "lm_head.weight"

    def renamed(tensors: Tensors) -> Tensors:
        names = {n: head if n == "lm_head.weight" else prefix + n.removeprefix("model.") for n in tensors}
        vision = {f"model.visual.blocks.{n}.attn.proj.weight": torch.ones(2) for n in range(3)}
        return {**{names[n]: t for n, t in tensors.items()}, **vision, "visual.pos_embed.weight": torch.ones(3)}

    change(tmp_path, renamed)
    with caplog.at_level(logging.INFO):
        assert_same_model(tmp_path, model)
    assert [r.message for r in caplog.records if "vision" in r.message] == [
        f"{tmp_path}: 4 tensors of the vision part are not loaded"
    ]


def test_experts_one_by_one(tmp_path: Path) -> None:
    model = save_hybrid(tmp_path, "moe")

    def split(tensors: Tensors) -> Tensors:
        result: Tensors = {}
        for name, tensor in tensors.items():
            stem, _, last = name.rpartition(".")
            if last == "gate_up_proj":
                for expert, both in enumerate(tensor):
                    result[f"{stem}.{expert}.gate_proj.weight"], result[f"{stem}.{expert}.up_proj.weight"] = both.chunk(
                        2
                    )
            elif name.endswith("experts.down_proj"):
                result |= {f"{stem}.{expert}.down_proj.weight": down for expert, down in enumerate(tensor)}
            else:
                result[name] = tensor
        return result

    # transformers may store them either way.
    if any(name.endswith("gate_up_proj") for name in load_file(tmp_path / "model.safetensors")):
        assert_same_model(tmp_path, model)
        change(tmp_path, split)
    assert_same_model(tmp_path, model)
    change(tmp_path, lambda t: {n: v for n, v in t.items() if n != "model.layers.2.mlp.experts.5.up_proj.weight"})
    with pytest.raises(ModelError, match=r"model\.layers\.2\.mlp\.experts\.5\.up_proj\.weight is missing"):
        load(tmp_path)


def test_decay_parameters_stay_float32(tmp_path: Path) -> None:
    """bfloat16 on disk or float32, in a bfloat16 model."""
    model = save_hybrid(tmp_path)
    names = [name for name in load_file(tmp_path / "model.safetensors") if name.endswith(("A_log", "dt_bias"))]
    assert len(names) == 6
    for dtype in (torch.float32, torch.bfloat16):
        change(tmp_path, lambda t, to=dtype: {n: v.to(to) if n in names else v for n, v in t.items()})
        config = EngineConfig(model=str(tmp_path), device="cpu", dtype="bfloat16")
        slots = {s.name: s.target for s in load_model(config, lambda share, what: None).model.slots()}
        weights = model.state_dict()
        for name in names:
            assert slots[name].dtype == torch.float32
            assert torch.equal(slots[name], weights[name].to(dtype).float())
        assert slots["model.layers.0.linear_attn.norm.weight"].dtype == torch.bfloat16


def mtp_tensors(model: Any) -> Tensors:
    body = decoder(model)
    assert isinstance(body, HybridDecoder)
    return {slot.name: torch.full(slot.target.shape, 0.01) for slot in MtpHead(body).slots()}


@pytest.mark.parametrize("prefix", ["", "model."])
def test_mtp_where_config_and_weights_have_it(tmp_path: Path, prefix: str) -> None:
    model = save_hybrid(tmp_path)
    assert load(tmp_path).mtp is None
    edit(tmp_path / "config.json", mtp_num_hidden_layers=1)
    assert load(tmp_path).mtp is None  # many files lack it
    added = {prefix + name: tensor for name, tensor in mtp_tensors(model).items()}
    assert len(added) == 15
    change(tmp_path, lambda t: {**t, **added})
    loaded = assert_same_model(tmp_path, model)
    assert loaded.mtp is not None
    assert all(bool((slot.target == 0.01).all()) for slot in loaded.mtp.slots())
    change(tmp_path, lambda t: {n: v for n, v in t.items() if n != f"{prefix}mtp.norm.weight"})
    with pytest.raises(ModelError, match=r"tensor mtp\.norm\.weight is missing"):
        load(tmp_path)
    # The config says no: whatever the file holds is left out.
    edit(tmp_path / "config.json", mtp_num_hidden_layers=0)
    assert load(tmp_path).mtp is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.layers.0.linear_attn.A_log", None, "is missing; expected with shape .4."),
        ("model.layers.0.linear_attn.conv1d.weight", torch.ones(64, 4), "has the shape .64, 4.; expected .64, 1, 4."),
        ("model.layers.3.self_attn.q_proj.weight", torch.ones(96, 48), "has the shape .96, 48.; expected .192, 48."),
        ("model.layers.1.mlp.up_proj.weight", torch.full((80, 48), torch.nan), "values that are not finite"),
        ("model.norm.weight", torch.tensor([0.0] * 47 + [torch.inf]), "values that are not finite"),
        ("model.layers.0.linear_attn.in_proj_qkvz.weight", torch.ones(3), "is not part of a qwen3_5 decoder"),
        ("mtp.fc.weight", torch.full((48, 96), torch.nan), "values that are not finite"),
    ],
)
def test_tensor_that_does_not_fit(tmp_path: Path, name: str, value: Tensor | None, message: str) -> None:
    model = save_hybrid(tmp_path)
    edit(tmp_path / "config.json", mtp_num_hidden_layers=1)
    change(tmp_path, lambda t: {**t, **mtp_tensors(model)})
    load(tmp_path)
    rest = {} if value is None else {name: value}
    change(tmp_path, lambda t: {**{n: v for n, v in t.items() if n != name}, **rest})
    with pytest.raises(ModelError, match=rf"{tmp_path}: tensor {name}.*{message}"):
        load(tmp_path)


def test_message_names_the_tensor_as_the_file_does(tmp_path: Path) -> None:
    save_hybrid(tmp_path)
    change(tmp_path, lambda t: {n.replace("model.", "model.language_model."): v for n, v in t.items()})
    change(tmp_path, lambda t: {**t, "model.language_model.norm.weight": torch.ones(47)})
    expected = r"tensor model\.language_model\.norm\.weight of model\.safetensors has the shape .47.; expected .48."
    with pytest.raises(ModelError, match=expected):
        load(tmp_path)


def test_the_index_may_name_tensors_that_no_shard_holds(tmp_path: Path) -> None:
    model = save_hybrid(tmp_path)
    names = dict.fromkeys([*load_file(tmp_path / "model.safetensors"), "mtp.fc.weight"], "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    edit(tmp_path / "config.json", mtp_num_hidden_layers=1)
    assert assert_same_model(tmp_path, model).mtp is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 3 + ["sliding"]}, r"layer_types\[3\] = 'sliding' is not supported"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types does not name the 4 layers"),
        ({"layer_types": ["linear_attention"] * 4}, "must be of both types"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval is 0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, "rope_parameters.rope_type = 'yarn'"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is None"),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 1.5}}, "partial_rotary_factor is 1.5"),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.2}}, "3 of 16 dims would rotate"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is 3; 2 key heads"),
        ({"linear_key_head_dim": 0}, "key_dim 0"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        ({"num_key_value_heads": 4}, "6 query heads cannot share 4"),
        ({"head_dim": "16"}, "head_dim is '16'; expected a whole number"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2"),
        ({"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
        ({"model_type": "qwen3_next"}, "model_type 'qwen3_next' is not supported; known: .*qwen3_5, .*qwen3_5_moe"),
    ],
)
def test_config_that_cannot_be_honoured(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_hybrid(tmp_path)
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(ModelError, match=rf"{tmp_path}/config\.json: .*{message}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "num_experts is None"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; expected 1 to 8"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size 0 must be positive"),
    ],
)
def test_experts_that_cannot_be_honoured(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_hybrid(tmp_path, "moe")
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_the_27b_and_the_35b() -> None:
    """As their files have it; the second one in the older, flat form of the rotary embedding."""
    shared = {
        "vocab_size": 248320,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "mtp_num_hidden_layers": 1,
        "attn_output_gate": True,
        "output_gate_type": "swish",
    }
    large = parse_hybrid_config(
        {
            "model_type": "qwen3_5",
            "tie_word_embeddings": False,
            "text_config": {
                **shared,
                "hidden_size": 5120,
                "num_hidden_layers": 64,
                "intermediate_size": 17408,
                "num_attention_heads": 24,
                "num_key_value_heads": 4,
                "linear_num_value_heads": 48,
                "rope_parameters": {
                    "type": "default",
                    "rope_theta": 10000000,
                    "partial_rotary_factor": 0.25,
                    "mrope_section": [11, 11, 10],
                    "mrope_interleaved": True,
                },
            },
        }
    )
    assert large == HybridConfig(
        architecture="qwen3_5",
        vocab_size=248320,
        hidden_size=5120,
        layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention") * 16,
        heads=24,
        kv_heads=4,
        head_dim=256,
        rotary_dim=64,
        rope_theta=1e7,
        delta_net=DeltaNetConfig(key_heads=16, value_heads=48, key_dim=128, value_dim=128, conv_width=4),
        mlp=17408,
        rms_norm_eps=1e-6,
        context_length=262144,
        mtp=True,
    )
    assert (large.attention_layers, large.delta_net_layers, large.delta_net.channels) == (16, 48, 10240)
    small = parse_hybrid_config(
        {
            **shared,
            "model_type": "qwen3_5_moe_text",
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 32,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "rope_theta": 1e7,
            "rope_scaling": {"type": "mrope", "mrope_section": [11, 11, 10]},
        }
    )
    assert small.mlp == ExpertsConfig(count=256, chosen=8, width=512, shared_width=512)
    assert (small.rotary_dim, small.rope_theta, small.attention_layers) == (64, 1e7, 10)


def test_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_hybrid(tmp_path)

    def name(dtype: torch.dtype = torch.float32, state_dtype: StateDtype = "float32") -> str:
        return fingerprint(SafetensorsCheckpoint(tmp_path), dtype, state_dtype=state_dtype)

    seen = [name(), name(torch.bfloat16), name(torch.float16), name(state_dtype="float16")]
    edit(tmp_path / "config.json", rope_parameters={"rope_theta": 10_000.0, "partial_rotary_factor": 0.5})
    seen.append(name())
    monkeypatch.setattr("services.engine.cache.states.LAYOUT_VERSION", 2)
    seen.append(fingerprint_module.fingerprint(SafetensorsCheckpoint(tmp_path), torch.float32))
    assert len(set(seen)) == 6
