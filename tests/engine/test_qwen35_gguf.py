"""The Qwen3.5 family in GGUF files: llama.cpp's names, orders and types."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from kernels.linear import quantized
from kernels.linear.grouped import form
from kernels.linear.grouped.form import Grouped
from services.engine.config import EngineConfig
from services.engine.model.config import ModelError
from services.engine.model.family import parse_model_config
from services.engine.model.hybrid_config import HybridConfig
from services.engine.weights.gguf_checkpoint import GgufCheckpoint
from services.engine.weights.loader import load_model
from services.engine.weights.safetensors_checkpoint import SafetensorsCheckpoint
from services.engine.weights.source import DENSE
from tests.engine import qwen35_files
from tests.engine.hybrid_models import hybrid_oracle
from tests.engine.tiny_models import Bench, oracle_logits, random_ids, row

TINY = Path(__file__).parents[2] / "models" / "samovar-tiny"


def load(path: Path) -> Any:
    return load_model(EngineConfig(model=str(path), device="cpu"), lambda share, what: None)


def config_of(model: Any) -> HybridConfig:
    config = parse_model_config(model.config.to_dict())
    assert isinstance(config, HybridConfig)
    return config


def stored(config: HybridConfig) -> HybridConfig:
    """With the numbers that fit into GGUF's float32."""
    return replace(config, rms_norm_eps=float(np.float32(config.rms_norm_eps)))


def assert_same_model(path: Path, model: Any) -> Any:
    loaded = load(path)
    ids = random_ids(80, seed=1)
    logits = Bench(loaded.model).run(row(ids, 0, 80, [1, 0], state=3))
    torch.testing.assert_close(logits[0], oracle_logits(model, ids)[-1], atol=1e-4, rtol=0)
    return loaded


@pytest.mark.parametrize("shape", ["dense", "dense-three", "moe", "moe-three"])
def test_float32(tmp_path: Path, shape: str) -> None:
    """Two value heads a key head, where a wrong transpose is its own inverse, and three, where it is not."""
    model = hybrid_oracle(shape)
    config = config_of(model)
    qwen35_files.write(tmp_path / "m.gguf", config, model.state_dict())
    assert assert_same_model(tmp_path / "m.gguf", model).model_config == stored(config)


def test_recurrent_layers_by_name_and_a_tied_head(tmp_path: Path) -> None:
    """Full attention first and then states: newer converters write a list; K/V heads one a layer."""
    model = hybrid_oracle("dense-odd")
    config = config_of(model)
    assert config.tied_head
    entries = {
        "qwen35.attention.recurrent_layers": [False, True, True],
        "qwen35.attention.head_count_kv": [1, 0, 0],
        "qwen35.full_attention_interval": None,
    }
    qwen35_files.write(tmp_path / "m.gguf", config, model.state_dict(), entries=entries)
    assert assert_same_model(tmp_path / "m.gguf", model).model_config == stored(config)


MIXED = {
    "attn_qkv.weight": Kind.Q4_K,
    "attn_gate.weight": Kind.IQ3_S,
    "ssm_out.weight": Kind.Q5_K,
    "ssm_alpha.weight": Kind.BF16,
    "attn_q.weight": Kind.Q6_K,
    "attn_k.weight": Kind.Q8_0,
    "attn_v.weight": Kind.F16,
    "attn_output.weight": Kind.Q5_0,
    "ffn_gate.weight": Kind.IQ2_XS,
    "ffn_up.weight": Kind.IQ4_XS,
    "ffn_down.weight": Kind.NVFP4,
    "ffn_gate_exps.weight": Kind.IQ2_XXS,
    "ffn_up_exps.weight": Kind.IQ2_XXS,
    "ffn_down_exps.weight": Kind.Q4_1,
    "ffn_up_shexp.weight": Kind.TQ2_0,
    "token_embd.weight": Kind.IQ1_M,
    "output.weight": Kind.Q3_K,
}
WIDE = {"hidden_size": 256, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 128}


@pytest.mark.parametrize("shape", ["dense", "moe"])
def test_types_mixed_by_tensor(tmp_path: Path, shape: str) -> None:
    """Decoded values and codes, in the order of `transformers`. Two value heads share a super-block of ssm_out."""
    width = {"intermediate_size": 192} if shape == "dense" else {"moe_intermediate_size": 32, "num_experts": 3}
    model = hybrid_oracle(shape, **WIDE, **width)
    config = config_of(model)
    tensors = model.state_dict()
    held = qwen35_files.write(tmp_path / "m.gguf", config, tensors, MIXED)
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    assert checkpoint.names() == tensors.keys()
    seen = set()
    for name, expected in qwen35_files.restored(config, tensors, held).items():
        target = torch.full(expected.shape, torch.nan)
        checkpoint.read(name, target)
        np.testing.assert_array_equal(target.numpy(), expected, err_msg=name)
        seen.add(checkpoint.format(name))
        if checkpoint.format(name) in DENSE:
            continue
        rows = int(np.prod(expected.shape[:-1]))
        pieces = [checkpoint.encoded(name, at, min(rows, at + 77)) for at in range(0, rows, 77)]
        values = torch.cat([dequantize(piece) for piece in pieces]).view(expected.shape)
        np.testing.assert_array_equal(values.numpy(), expected, err_msg=name)
    formats = {"grouped", "bf16", "float16", "float32", "int8-g32"} | ({"nvfp4"} if shape == "dense" else set())
    assert seen == formats
    assert checkpoint.format("model.layers.0.linear_attn.out_proj.weight") == "grouped"


def dequantize(natural: quantized.Quantized | Grouped) -> Tensor:
    return form.dequantize(natural) if isinstance(natural, Grouped) else quantized.dequantize(natural)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.NVFP4])
def test_columns_in_formats_of_ours(tmp_path: Path, kind: Kind) -> None:
    model = hybrid_oracle("dense", linear_num_value_heads=6, linear_value_head_dim=64)
    config = config_of(model)
    held = qwen35_files.write(tmp_path / "m.gguf", config, model.state_dict(), {"ssm_out.weight": kind})
    name = "model.layers.1.linear_attn.out_proj.weight"
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    assert checkpoint.format(name) == {Kind.Q8_0: "int8-g32", Kind.NVFP4: "nvfp4"}[kind]
    expected = qwen35_files.restored(config, model.state_dict(), held)[name]
    np.testing.assert_array_equal(dequantize(checkpoint.encoded(name, 0, 48)).numpy(), expected)


def test_columns_of_heads_too_narrow_are_decoded(tmp_path: Path) -> None:
    model = hybrid_oracle("dense", linear_num_value_heads=8)  # of 8 columns each
    config = config_of(model)
    held = qwen35_files.write(tmp_path / "m.gguf", config, model.state_dict(), {"ssm_out.weight": Kind.Q8_0})
    name = "model.layers.1.linear_attn.out_proj.weight"
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    assert checkpoint.format(name) == "float32"
    target = torch.full((48, 64), torch.nan)
    checkpoint.read(name, target)
    expected = qwen35_files.restored(config, model.state_dict(), held)[name]
    np.testing.assert_array_equal(target.numpy(), expected)


def test_experts_of_two_types(tmp_path: Path) -> None:
    """Gates and ups cannot be one tensor then: they come expert by expert."""
    model = hybrid_oracle("moe", hidden_size=64)
    config = config_of(model)
    tensors = model.state_dict()
    types = {"ffn_gate_exps.weight": Kind.Q4_0, "ffn_up_exps.weight": Kind.Q8_0}
    held = qwen35_files.write(tmp_path / "m.gguf", config, tensors, types)
    values = qwen35_files.restored(config, tensors, held)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in values.items()}, strict=False)
    assert_same_model(tmp_path / "m.gguf", model)
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    up = "model.layers.2.mlp.experts.5.up_proj.weight"
    assert checkpoint.format(up) == "int8-g32"
    expected = values["model.layers.2.mlp.experts.gate_up_proj"][5, 24:]
    np.testing.assert_array_equal(dequantize(checkpoint.encoded(up, 0, 24)).numpy(), expected)


def test_scale_for_each_expert(tmp_path: Path) -> None:
    """NVFP4 files of experts have one beside each of the stacked tensors."""
    model = hybrid_oracle("moe", hidden_size=64)
    config = config_of(model)
    tensors = model.state_dict()
    scales = np.arange(1, 9, dtype=np.float32) / 4
    types = {"ffn_gate_exps.weight": Kind.NVFP4, "ffn_up_exps.weight": Kind.NVFP4}
    beside = {"blk.1.ffn_gate_exps.scale": scales, "blk.1.ffn_up_exps.scale": scales[::-1].copy()}
    held = qwen35_files.write(tmp_path / "m.gguf", config, tensors, types, further=beside)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    expected = qwen35_files.restored(config, tensors, held)[name]
    expected[:, :24] *= scales[:, None, None]
    expected[:, 24:] *= scales[::-1, None, None]
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    values = dequantize(checkpoint.encoded(name, 0, 8 * 48)).view(8, 48, 64)
    np.testing.assert_array_equal(values.numpy(), expected)
    target = torch.full((8, 48, 64), torch.nan)
    checkpoint.read(name, target)
    np.testing.assert_array_equal(target.numpy(), expected)


def tiny_vocabulary(rows: int) -> tuple[Tokenizer, dict[str, Any]]:
    """The tiny model's tokenizer, and what the converter makes of it: every id up to `rows` has a token."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    raw = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["id"]: token["special"] for token in raw["added_tokens"]}
    tokens, types = [], []
    for index in range(rows):
        text = tokenizer.id_to_token(index)
        tokens.append(f"[PAD{index}]" if text is None else text)
        types.append(5 if text is None else {None: 1, True: 3, False: 4}[special.get(index)])
    merges = [" ".join(pair) for pair in raw["model"]["merges"]]
    template = (TINY / "chat_template.jinja").read_text(encoding="utf-8")
    return tokenizer, {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 4089,
        "tokenizer.ggml.padding_token_id": 4087,
        "tokenizer.chat_template": template,
    }


TEXTS = [
    "Hello, World! 123 4567\n\n  def f(x):\n\treturn x+1  # it's\r\n",
    "<|im_start|>user\nCall <tool_call>{}</tool_call> now<think>\n</think><|im_end|>",
    "naïve café, Ångström, 日本語 текст हिन्दी [PAD4096] <|endoftext|>",
]


def test_the_trained_model(tmp_path: Path) -> None:
    """The same weights as safetensors and as GGUF give the same logits, draft head and tokenizer."""
    original = load(TINY)
    config = original.model_config
    assert config.mtp
    assert config.tied_head
    tokenizer, entries = tiny_vocabulary(4096)
    tensors = load_file(TINY / "model.safetensors")
    types = {"ssm_conv1d.weight": Kind.F32, "norm.weight": Kind.F32, "weight": Kind.BF16}
    qwen35_files.write(tmp_path / "m.gguf", config, tensors, types, entries)
    loaded = load(tmp_path / "m.gguf")
    assert loaded.model_config == stored(config)
    ids = tokenizer.encode(TEXTS[0] * 4).ids[:120]
    step = row(ids, 0, len(ids), [1, 0], state=3)
    torch.testing.assert_close(Bench(loaded.model).run(step), Bench(original.model).run(step), atol=1e-4, rtol=0)
    drafts = zip(original.mtp.slots(), loaded.mtp.slots(), strict=True)
    for one, other in drafts:
        if hasattr(one, "target"):
            torch.testing.assert_close(one.target, other.target, atol=1e-6, rtol=0)
    assert loaded.bundle.chat_template == original.bundle.chat_template
    assert set(loaded.bundle.special.stop_ids) == set(original.bundle.special.stop_ids)


def test_logits_of_llama_cpp(tmp_path: Path) -> None:
    """The trained model there and here, at some positions, computed in float32 both times. The file that its converter
    writes has equal tensors; see `source` in the data."""
    config = SafetensorsCheckpoint(TINY).config
    assert isinstance(config, HybridConfig)
    qwen35_files.write(tmp_path / "m.gguf", config, load_file(TINY / "model.safetensors"))
    bench = Bench(load(tmp_path / "m.gguf").model)
    expected = json.loads((Path(__file__).parent / "qwen35_logits.json").read_text(encoding="utf-8"))
    ids, start = expected["ids"], 0
    for place in expected["positions"]:
        end = place["position"] + 1
        logits = bench.run(row(ids, start, end, [1, 0], state=3))[0]
        torch.testing.assert_close(logits[place["tokens"]], torch.tensor(place["logits"]), atol=1e-4, rtol=0)
        start = end


def test_tokenizer_with_holes(tmp_path: Path) -> None:
    """Rows behind the vocabulary are no tokens; tool and thought tokens are found in text but are not special."""
    model = hybrid_oracle("dense", vocab_size=4100)
    tokenizer, entries = tiny_vocabulary(4100)
    qwen35_files.write(tmp_path / "m.gguf", config_of(model), model.state_dict(), entries=entries)
    read = Tokenizer.from_str(GgufCheckpoint(tmp_path / "m.gguf").bundle().tokenizer_json)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert read.encode(text, add_special_tokens=False).ids == ids
        for skip in (True, False):
            assert read.decode(ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert read.decode([4097, 4099]) == ""


def test_draft_layer(tmp_path: Path) -> None:
    """As one more block; files without it announce none."""
    model = hybrid_oracle("dense")
    plain = config_of(model)
    config = parse_model_config({**model.config.to_dict(), "mtp_num_hidden_layers": 1})
    assert isinstance(config, HybridConfig)
    attention = {n.removeprefix("model.layers.3."): t for n, t in model.state_dict().items() if ".layers.3." in n}
    layer = {f"mtp.layers.0.{name}": tensor * 0.5 for name, tensor in attention.items()}
    rest = {
        "mtp.fc.weight": torch.randn(48, 96),
        **{f"mtp.{name}.weight": torch.randn(48) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")},
    }
    added = {**layer, **rest}
    assert len(added) == 15
    qwen35_files.write(tmp_path / "with.gguf", config, {**model.state_dict(), **added})
    checkpoint = GgufCheckpoint(tmp_path / "with.gguf")
    assert checkpoint.config == stored(config)
    for name, expected in added.items():
        target = torch.full(expected.shape, torch.nan)
        checkpoint.read(name, target)
        torch.testing.assert_close(target, expected, atol=1e-6, rtol=0)
    assert assert_same_model(tmp_path / "with.gguf", model).mtp is not None
    # The metadata announces it, the tensors are in another file.
    qwen35_files.write(tmp_path / "lost.gguf", config, {**model.state_dict(), **added}, without=r"blk\.4\.")
    assert assert_same_model(tmp_path / "lost.gguf", model).mtp is None
    qwen35_files.write(tmp_path / "without.gguf", plain, model.state_dict())
    assert load(tmp_path / "without.gguf").mtp is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "clip"}, r"vision part of a model \(mmproj\)"),
        ({"architecture": "qwen3next"}, r"'qwen3next' is not supported; known: .*qwen35, qwen35moe"),
        ({"without": r"blk\.1\.ssm_a$"}, r"tensor blk\.1\.ssm_a is missing; expected with shape \[4\]"),
        ({"without": r"blk\.0\.ssm_out"}, r"tensor blk\.0\.ssm_out\.weight is missing.*\[48, 32\]"),
        ({"without": r"blk\.3\.attn_q_norm"}, r"tensor blk\.3\.attn_q_norm\.weight is missing"),
        ({"without": "token_embd"}, r"tensor token_embd\.weight is missing"),
        ({"entries": {"qwen35.ssm.group_count": None}}, r"qwen35\.ssm\.group_count is missing"),
        ({"entries": {"qwen35.ssm.inner_size": 33}}, r"ssm\.inner_size is 33; 4 heads"),
        ({"entries": {"qwen35.ssm.group_count": 3}}, r"linear_num_value_heads is 4; 3 key heads"),
        ({"entries": {"qwen35.rope.scaling.type": "yarn"}}, r"qwen35\.rope\.scaling\.type = 'yarn'"),
        ({"entries": {"qwen35.nextn_predict_layers": 2}}, r"qwen35\.nextn_predict_layers = 2"),
        ({"entries": {"qwen35.attention.head_count_kv": [0, 0, 0, 2, 1]}}, r"head_count_kv names \[1, 2\] heads"),
        ({"entries": {"qwen35.attention.recurrent_layers": [True]}}, r"recurrent_layers has 1 entries for 4 layers"),
        ({"entries": {"qwen35.full_attention_interval": 0}}, r"full_attention_interval is 0; it must be positive"),
        ({"further": {"blk.2.ssm_x.weight": np.ones(3, np.float32)}}, r"tensor blk\.2\.ssm_x\.weight is not part of"),
        (
            {"further": {"blk.0.ssm_out.weight": np.ones((48, 40), np.float32)}, "without": r"blk\.0\.ssm_out"},
            r"tensor blk\.0\.ssm_out\.weight has the shape \[48, 40\]; expected \[48, 32\]",
        ),
    ],
)
def test_what_cannot_be_served(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    model = hybrid_oracle("dense")
    qwen35_files.write(tmp_path / "model.gguf", config_of(model), model.state_dict(), **options)
    with pytest.raises(ModelError, match=r"model\.gguf.*" + message):
        load(tmp_path / "model.gguf")
