"""What cannot be read says which file, tensor or key is wrong."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.engine.config import EngineConfig
from services.engine.model.config import ModelError
from services.engine.weights.loader import load_model
from services.engine.weights.readers import open_folder
from services.engine.weights.safetensors_checkpoint import SafetensorsCheckpoint
from tests.engine.test_safetensors import edit
from tests.engine.weights.foreign import LINEAR, Encode, Encoded, change, write
from tests.engine.weights.test_float_readers import blocks, fp8_config, nvfp4, per_tensor
from tests.engine.weights.test_integer_readers import awq, gptq, gptq_config

UP = "model.layers.0.mlp.up_proj"
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}


def only(module: str, encode: Callable[[Tensor], Encoded]) -> Encode:
    return lambda name, weight: encode(weight) if name == f"{module}.weight" else None


def read_all(folder: Path) -> None:
    """By decoding: through the loader."""
    load_model(EngineConfig(model=str(folder), device="cpu"), lambda share, what: None)


def compressed(weight: Tensor, **changes: Tensor | None) -> Encoded:
    """pack-quantized, whose values play no role."""
    rows, columns = weight.shape
    parts: dict[str, Tensor | None] = {
        "weight_packed": torch.zeros((rows, columns // 8), dtype=torch.int32),
        "weight_scale": torch.ones((rows, columns // 128), dtype=torch.bfloat16),
        "weight_shape": torch.tensor([rows, columns]),
        **changes,
    }
    return {role: part for role, part in parts.items() if part is not None}, weight


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method = 'bitsandbytes' is not supported; supported: fp8, compressed-",
        ),
        ({"bits": 4}, "quant_method = None is not supported"),
        ("awq", "quantization_config = 'awq'; expected an object"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "marlin"}, "version = 'marlin' of AWQ"),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "bits = 8 of awq is not supported"),
        ({"quant_method": "gptq", "bits": "4"}, "bits = '4' of gptq"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size = 0"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:llm_x"}, "packing_format = 'auto_rou"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size = \[128\]"),
        ({"quant_method": "compressed-tensors"}, "config_groups = None"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {}}}, "config_groups.g has no list of targets"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {**GROUP, "format": "mxfp4-pack-quantized"}}},
            "the format 'mxfp4-pack-quantized' of g is not supported",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {**GROUP, "targets": ["re:*"]}}},
            r"the target 're:\*' is no regular expression",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {**GROUP, "weights": {"num_bits": 16}}}},
            "16 bits of the type 'int' are not supported",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": GROUP},
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            "sparsity_config",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": GROUP},
                "transform_config": {"config_groups": {"u": {"type": "hadamard"}}},
            },
            "transform_config is not supported",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo = 'NVFP4_AWQ' is not supported; known"),
        (
            {"quant_method": "modelopt", "quantized_layers": {"lm_head": {"quant_algo": "MXFP8"}}},
            "quantized_layers.lm_head = 'MXFP8'",
        ),
        ({"quant_method": "fp8"}, "names fp8 weights, but no tensor is quantized"),
    ],
)
def test_configs(tmp_path: Path, quantization: Any, message: str) -> None:
    write(tmp_path, "dense", lambda name, weight: None, quantization)
    with pytest.raises(ModelError, match=rf"{tmp_path}/config\.json: .*{message}"):
        open_folder(tmp_path)


def test_other_files_of_the_config(tmp_path: Path) -> None:
    """Older compressed-tensors has another key, ModelOpt a file of its own; both are looked at, here with an error."""
    write(tmp_path, "dense", lambda name, weight: None, None)
    assert isinstance(open_folder(tmp_path), SafetensorsCheckpoint)
    edit(tmp_path / "config.json", compression_config={"config_groups": {"g": {}}})
    with pytest.raises(ModelError, match=r"config_groups\.g has no list of targets"):
        open_folder(tmp_path)
    edit(tmp_path / "config.json", compression_config=None)
    edit(tmp_path / "hf_quant_config.json", quantization={"quant_algo": "W4A8_AWQ"})
    with pytest.raises(ModelError, match=r"hf_quant_config\.json: .*quant_algo = 'W4A8_AWQ'"):
        open_folder(tmp_path)


ASYMMETRIC = {"g": {**GROUP, "weights": {**GROUP["weights"], "symmetric": False}}}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"g": GROUP}}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
WRITTEN: dict[str, tuple[dict[str, Any], Callable[[Tensor], Encoded]]] = {
    "fp8": (fp8_config(), lambda weight: blocks(weight, torch.float32)),
    "fp8 of 64": (fp8_config(weight_block_size=[64, 64]), lambda weight: blocks(weight, torch.float32, 64)),
    "modelopt": (MODELOPT, nvfp4),
    "modelopt fp8": (MODELOPT, per_tensor),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128}, lambda weight: awq(weight, 128)),
    "gptq": (gptq_config(4, 128), lambda weight: gptq(weight, 4, 128, True)),
    "gptq said to be of 8 bits": (gptq_config(8, 128), lambda weight: gptq(weight, 4, 128, True)),
    "gptq said to be of 64": (gptq_config(4, 64), lambda weight: gptq(weight, 4, 128, True)),
    "compressed": (COMPRESSED, compressed),
    "asymmetric": ({**COMPRESSED, "config_groups": ASYMMETRIC}, compressed),
}


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


I32, F8 = torch.int32, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("written", "role", "tensor", "message"),
    [
        ("fp8", "weight_scale_inv", None, "weight of .* needs a tensor weight_scale beside it, which is missing"),
        ("fp8", "weight", None, "weight_scale_inv of .* needs a tensor weight beside it"),
        ("fp8", "weight_scale_inv", ones(4, 2), "has the shape .4, 2.; expected .5, 2."),
        ("fp8", "weight_scale_inv", ones(5, 2, dtype=I32), "has the type I32; expected F32 or BF16"),
        ("fp8", "weight", ones(640, 256, dtype=torch.int16), "is of the type I16, with weight_scale_inv beside it: no"),
        ("fp8", "weight", ones(640, 256), "is of the type F32, with weight_scale_inv beside it: no quantization known"),
        ("fp8", "weight", ones(640, dtype=F8), "has the shape .640.; expected a matrix or a stack"),
        ("fp8 of 64", "weight_scale_inv", ones(5, 2), "has the shape .5, 2.; expected .10, 4."),
        ("modelopt", "weight_scale_2", None, "is of the type U8, with weight_scale beside it"),
        ("modelopt", "weight_scale", ones(640, 8, dtype=F8), "has the shape .640, 8.; expected .640, 16."),
        ("modelopt", "weight_scale", ones(640, 16), "has the type F32; expected F8_E4M3"),
        ("modelopt", "weight_scale_2", ones(2), "has the shape .2.; expected .. or .1."),
        ("modelopt", "weight", ones(640, 127, dtype=torch.uint8), "has the shape .640, 127.; .* multiple of 8 bytes"),
        ("modelopt fp8", "input_scale", None, "is of 8-bit float; the quantization_config says 4-bit float in groups"),
        ("awq", "qzeros", None, "needs a tensor qzeros beside it"),
        ("awq", "scales", ones(3, 640), "qzeros .* has the shape .2, 80.; expected .3, 80."),
        ("awq", "qzeros", ones(2, 79, dtype=I32), "has the shape .2, 79.; expected .2, 80."),
        ("gptq", "g_idx", torch.full((256,), 2, dtype=I32), "names groups from 2 to 2; there are 2"),
        ("gptq", "g_idx", ones(128, dtype=I32), "has the shape .128.; expected .256."),
        ("gptq", "qzeros", ones(2, 60, dtype=I32), "holds zero points of 3 bits; supported: 2, 4, 8"),
        (
            "gptq said to be of 8 bits",
            "g_idx",
            None,
            "is of 4-bit int in groups of 128; .* says 8-bit int in groups of",
        ),
        ("gptq said to be of 64", "g_idx", None, "in groups of 128; .* in groups of 64"),
        ("compressed", "weight_shape", None, "needs a tensor weight_shape"),
        ("compressed", "weight_shape", torch.tensor([640, 300]), "has 32 words for 300 columns"),
        ("compressed", "weight_shape", torch.tensor([600, 256]), "is .600, 256., but the packed weights"),
        ("compressed", "weight_scale", ones(640, 4), "in groups of 64; .* in groups of 128"),
        ("compressed", "weight_scale", ones(640, 3), "has 3 groups, which 256 columns cannot form"),
        ("compressed", "weight_scale", ones(64, 2), "has the shape .64, 2.; expected one row"),
        ("compressed", "weight_zero_point", ones(640, 2, dtype=I32), "has the shape .640, 2.; expected .80, 2."),
        ("asymmetric", "weight_zero_point", None, "needs a tensor weight_zero_point"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, written: str, role: str, tensor: Tensor | None, message: str) -> None:
    quantization, encode = WRITTEN[written]
    write(tmp_path, "dense", only(UP, encode), quantization)
    change(tmp_path, f"{UP}.{role}", tensor)
    with pytest.raises(ModelError, match=rf"{tmp_path}: tensor {UP}\..*{message}"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("written", "role", "value", "message"),
    [
        ("fp8", "weight_scale_inv", torch.nan, "not finite"),
        ("fp8", "weight", torch.nan, "not finite"),
        ("fp8", "weight", -torch.nan, "not finite"),
        ("modelopt", "weight_scale", torch.nan, "not finite"),
        ("modelopt", "weight_scale_2", torch.inf, "is inf; expected above 0"),
        ("modelopt", "weight_scale_2", 0.0, "is 0.0; expected above 0"),
        ("awq", "scales", torch.inf, "not finite"),
        ("gptq", "scales", -torch.inf, "not finite"),
        ("compressed", "weight_scale", torch.nan, "not finite"),
    ],
)
def test_values_that_are_no_numbers(tmp_path: Path, written: str, role: str, value: float, message: str) -> None:
    quantization, encode = WRITTEN[written]

    def broken(weight: Tensor) -> Encoded:
        parts, values = encode(weight)
        part = parts[role].float()
        part.view(-1)[-1] = value
        return {**parts, role: part.to(parts[role].dtype)}, values

    write(tmp_path, "dense", only(UP, broken), quantization)
    source = open_folder(tmp_path)
    expected = rf"{tmp_path}: tensor {UP}\.{role} of model\.safetensors .*{message}"
    with pytest.raises(ModelError, match=expected):
        source.encoded(f"{UP}.weight", 0, 640)
    with pytest.raises(ModelError, match=expected):
        read_all(tmp_path)


def test_codes_beyond_the_bits_of_the_config(tmp_path: Path) -> None:
    """naive-quantized: one int8 an element, whatever the bits are."""

    def encode(weight: Tensor) -> Encoded:
        return {"weight": torch.full(weight.shape, 8, dtype=torch.int8), "weight_scale": ones(640, 2)}, weight

    write(tmp_path, "dense", only(UP, encode), COMPRESSED)
    with pytest.raises(ModelError, match=rf"{UP}\.weight of model\.safetensors holds codes of more than 4 bits"):
        open_folder(tmp_path).encoded(f"{UP}.weight", 0, 8)


def test_truncated(tmp_path: Path) -> None:
    write(tmp_path, "dense", only(UP, nvfp4), MODELOPT)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ModelError, match=r"model\.safetensors is no whole safetensors file"):
        open_folder(tmp_path)


def test_pieces_of_blocks(tmp_path: Path) -> None:
    write(tmp_path, "dense", only(UP, lambda w: blocks(w, torch.float32)), fp8_config())
    source = open_folder(tmp_path)
    with pytest.raises(ModelError, match="cannot start at row 64"):
        source.encoded(f"{UP}.weight", 64, 128)
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight of model\.safetensors is not quantized"):
        source.encoded("model.norm.weight", 0, 1)
    assert source.place(f"{UP}.weight") == f"tensor {UP}.weight of model.safetensors"


def test_the_index_may_name_tensors_that_no_shard_holds(tmp_path: Path) -> None:
    """As GSQ's does for MTP; what the shards hold counts."""
    written = write(tmp_path, "dense", only(UP, compressed), COMPRESSED)
    index = dict.fromkeys([*written, "mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight_packed"], "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert open_folder(tmp_path).names() == written.keys()
    read_all(tmp_path)


def test_quantized_although_the_config_leaves_it_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The tensors decide, and the log tells."""
    write(tmp_path, "dense", only(UP, compressed), {**COMPRESSED, "ignore": ["re:.*mlp.*"]})
    with caplog.at_level(logging.WARNING):
        source = open_folder(tmp_path)
    assert source.format(f"{UP}.weight") == "int4-g64"
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}: 1 tensors are quantized although the quantization_config leaves them out ({UP}.weight); read as "
        "stored"
    ]


def test_leftover_scale_of_a_plain_tensor(tmp_path: Path) -> None:
    """Quantized for training only, or half converted."""
    write(tmp_path, "dense", only(UP, nvfp4), MODELOPT)
    change(tmp_path, "model.layers.0.mlp.gate_proj.weight_scale", ones(640, 1))
    with pytest.raises(ModelError, match=r"gate_proj\.weight .* is of the type F32, with weight_scale beside it"):
        open_folder(tmp_path)


def test_unknown_tensors_are_not_overlooked(tmp_path: Path) -> None:
    write(tmp_path, "dense", only(UP, lambda w: ({**nvfp4(w)[0], "pre_quant_scale": torch.ones(256)}, w)), MODELOPT)
    with pytest.raises(ModelError, match=r"up_proj\.pre_quant_scale of model\.safetensors is not part of a qwen3_5"):
        read_all(tmp_path)


def test_all_linear_layers_without_a_scale(tmp_path: Path) -> None:
    def encode(name: str, weight: Tensor) -> Encoded | None:
        return ({"weight": weight.to(torch.float8_e4m3fn)}, weight) if LINEAR.fullmatch(name) else None

    write(tmp_path, "dense", encode, fp8_config())
    with pytest.raises(ModelError, match="needs a tensor weight_scale beside it, which is missing"):
        open_folder(tmp_path)
