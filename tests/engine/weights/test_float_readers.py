"""Official block FP8, and NVIDIA ModelOpt's NVFP4 and FP8."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.linear.quantized import E2M1, Quantized
from services.engine.config import EngineConfig
from services.engine.weights.loader import load_model
from services.engine.weights.readers import open_folder
from services.engine.weights.readers.modelopt_config import read_modelopt
from tests.engine.test_safetensors import edit, save
from tests.engine.tiny_models import Bench, row
from tests.engine.tiny_prompts import MODEL, prompts, tokenizer
from tests.engine.weights.foreign import LINEAR, Encode, Encoded, assert_serves, check, tiny, write

E4M3 = torch.float8_e4m3fn
FP8_MODULES = {"_proj.": "fp8-block", "in_proj_qkv": "fp8-block", "in_proj_z": "fp8-block"}


def blocks(weight: Tensor, dtype: torch.dtype, size: int = 128) -> Encoded:
    """Also of a stack."""
    rows, columns = weight.shape[-2:]
    padded = torch.nn.functional.pad(weight, (0, -columns % size, 0, -rows % size))
    peaks = padded.abs().unflatten(-2, (-1, size)).unflatten(-1, (-1, size)).amax((-3, -1))
    scale = peaks / 448.0
    scale = (scale.log2().ceil().exp2() if dtype == torch.float8_e8m0fnu else scale).to(dtype)
    wide = scale.float().repeat_interleave(size, -2).repeat_interleave(size, -1)[..., :rows, :columns]
    codes = (weight / wide).clamp(-448, 448).to(E4M3)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * wide


def stacked(weight: Tensor) -> Encoded:
    parts, values = blocks(weight, torch.bfloat16)
    return {"weight": parts["weight"], "scale_inv": parts["weight_scale_inv"]}, values


def per_tensor(weight: Tensor, shape: tuple[int, ...] = ()) -> Encoded:
    scale = weight.abs().amax() / 448.0
    codes = (weight / scale).to(E4M3)
    parts = {"weight": codes, "weight_scale": scale.reshape(shape), "input_scale": torch.tensor(0.5)}
    return parts, codes.float() * scale


def per_row(weight: Tensor) -> Encoded:
    scale = weight.abs().amax(-1) / 448.0
    codes = (weight / scale[:, None]).to(E4M3)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale[:, None]


def nvfp4(weight: Tensor, shape: tuple[int, ...] = ()) -> Encoded:
    """ModelOpt's: the global scale is a factor. Of a stack: one for each matrix."""
    whole = weight.abs().amax((-2, -1)) / (6.0 * 448.0)
    peaks = weight.abs().unflatten(-1, (-1, 16)).amax(-1)
    scale = (peaks / 6.0 / whole[..., None, None]).to(E4M3)
    steps = (scale.float() * whole[..., None, None]).repeat_interleave(16, -1)
    values = torch.tensor(E2M1)
    codes = (weight / steps).nan_to_num()[..., None].sub(values).abs().argmin(-1).to(torch.uint8)
    parts = {
        "weight": codes[..., 0::2] | codes[..., 1::2] << 4,
        "weight_scale": scale,
        "weight_scale_2": whole.reshape(shape) if weight.dim() == 2 else whole,
        "input_scale": torch.tensor([0.25]),
    }
    return parts, values[codes.long()] * scale.float().repeat_interleave(16, -1) * whole[..., None, None]


def linears(encode: Any) -> Encode:
    return lambda name, weight: encode(weight) if LINEAR.fullmatch(name) else None


def fp8_config(**changes: Any) -> dict[str, Any]:
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    left_out = ["lm_head", "model.visual.blocks.0", *(f"model.layers.{n}.mlp.gate" for n in range(2)), "in_proj_a"]
    return {**config, "modules_to_not_convert": left_out, **changes}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.float8_e8m0fnu], ids=str)
def test_block_fp8(tmp_path: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        written = write(tmp_path, "dense", linears(lambda w: blocks(w, dtype)), fp8_config(), "model.language_model.")
        source = check(tmp_path, written, FP8_MODULES)
    assert not caplog.records  # the router is left out, `gate_proj` is not
    name = "model.layers.0.mlp.gate_proj.weight"
    ours = source.encoded(name, 128, 640)
    assert isinstance(ours, Quantized)
    assert ours.scales is not None
    assert ours.scales.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    parts, _ = blocks(tiny("dense").state_dict()[name], dtype)
    assert torch.equal(ours.codes, parts["weight"][128:].view(torch.uint8))
    assert torch.equal(ours.scales.float(), parts["weight_scale_inv"][1:].float())
    if dtype == torch.bfloat16:
        assert_serves(tmp_path, "dense", written)


def test_blocks_that_are_not_full(tmp_path: Path) -> None:
    def encode(name: str, weight: Tensor) -> Encoded | None:
        return blocks(weight, torch.float32) if ".mlp." in name else None

    written = write(tmp_path, "odd", encode, fp8_config())
    check(tmp_path, written, {".mlp.": "fp8-block"})
    assert_serves(tmp_path, "odd", written)


@pytest.mark.parametrize("one_by_one", [True, False])
def test_block_fp8_experts(tmp_path: Path, one_by_one: bool) -> None:
    """Each by itself, as the official files have them, and stacked (`gate_up_proj_scale_inv`)."""

    def encode(name: str, weight: Tensor) -> Encoded | None:
        if weight.dim() == 3 and ".experts." in name:
            return stacked(weight)
        return blocks(weight, torch.bfloat16) if LINEAR.fullmatch(name) else None

    written = write(tmp_path, "moe", encode, fp8_config(), one_by_one=one_by_one)
    formats = {"shared_expert_gate": "float32", "experts.down_proj": "fp8-block", "experts.gate_up": "fp8-block"}
    check(tmp_path, written, {**formats, **FP8_MODULES})
    assert_serves(tmp_path, "moe", written)


def test_stack_whose_blocks_would_reach_into_the_next_expert(tmp_path: Path) -> None:
    """64 rows each with blocks of 128: no matrix of ours, read nevertheless."""

    def encode(name: str, weight: Tensor) -> Encoded | None:
        return stacked(weight[:, :64]) if "gate_up" in name else None

    written = write(tmp_path, "moe", encode, fp8_config())
    source = open_folder(tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert (source.shape(name), source.format(name)) == ((4, 64, 256), "bf16")
    target = torch.empty(source.shape(name))
    source.read(name, target)
    assert torch.equal(target, written[name])


@pytest.mark.parametrize("scale_name", ["weight_scale", "weight_scale_inv"])
def test_fp8_with_one_scale_a_tensor(tmp_path: Path, scale_name: str) -> None:
    def encode(weight: Tensor) -> Encoded:
        parts, values = per_tensor(weight, (1,))
        return {scale_name if role == "weight_scale" else role: part for role, part in parts.items()}, values

    quantization = fp8_config(weight_block_size=None, activation_scheme="static", ignored_layers=["lm_head"])
    written = write(tmp_path, "dense", linears(encode), quantization)
    check(tmp_path, written, dict.fromkeys(FP8_MODULES, "fp8"))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_small_model_with_its_mtp_head(tmp_path: Path, prefix: str) -> None:
    """models/samovar-tiny as an official FP8 release: the layer of the MTP head is quantized too, `mtp.fc` is not. It
    computes what the same values do in plain files."""
    folders = {kind: tmp_path / kind for kind in ("fp8", "plain")}
    config = json.loads((MODEL / "config.json").read_text())
    tensors: dict[str, dict[str, Tensor]] = {kind: {} for kind in folders}
    for name, weight in load_file(MODEL / "model.safetensors").items():
        stored = prefix + name if name.startswith("mtp.") else name.replace("model.", "model.language_model.", 1)
        tensors["plain"][stored], tensors["fp8"][stored] = weight.float(), weight
        if LINEAR.fullmatch(name):
            parts, tensors["plain"][stored] = blocks(weight.float(), torch.bfloat16)
            tensors["fp8"] |= {stored: parts["weight"], f"{stored}_scale_inv": parts["weight_scale_inv"]}
    for kind, folder in folders.items():
        shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        quantization = {"quantization_config": fp8_config()} if kind == "fp8" else {}
        (folder / "config.json").write_text(json.dumps({**config, **quantization}))
        save_file(tensors[kind], folder / "model.safetensors")
    ids = tokenizer().encode(prompts("chat", 1)[0]).ids
    logits = []
    for folder in folders.values():
        loaded = load_model(EngineConfig(model=str(folder), device="cpu"), lambda share, what: None)
        assert loaded.mtp is not None
        logits.append(Bench(loaded.model).run(row(ids, 0, len(ids), range(4), state=0)))
    assert torch.equal(*logits)
    source = open_folder(folders["fp8"])
    assert source.format("mtp.layers.0.mlp.up_proj.weight") == "fp8-block"
    assert source.format("mtp.fc.weight") == source.format("model.embed_tokens.weight") == "bf16"
    assert "lm_head.weight" not in source.names()


def test_another_family(tmp_path: Path) -> None:
    """A dense decoder: its names have no prefix, 48 columns fill no block."""
    save(tmp_path, "qwen3")
    path = tmp_path / "model.safetensors"
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, weight in load_file(path).items():
        parts, values[name] = blocks(weight, torch.float32) if "_proj" in name else ({"weight": weight}, weight)
        stored |= {name.removesuffix("weight") + role: part for role, part in parts.items()}
    save_file(stored, path)
    edit(tmp_path / "config.json", quantization_config=fp8_config())
    check(tmp_path, values, {"_proj.": "fp8-block"})
    load_model(EngineConfig(model=str(tmp_path), device="cpu"), lambda share, what: None)


def modelopt_config(where: str, folder: Path, **quantization: Any) -> dict[str, Any] | None:
    """In config.json, in hf_quant_config.json, or one half in each."""
    producer = {"name": "modelopt", "version": "0.47.0"}
    inside = {key: value for key, value in quantization.items() if where != "beside" and key != "exclude_modules"}
    if where != "inside":
        beside = quantization if where == "beside" else {"exclude_modules": quantization.get("exclude_modules")}
        content = {"producer": producer, "quantization": beside}
        (folder / "hf_quant_config.json").write_text(json.dumps(content))
    if where == "beside":
        return None
    ignore = {"ignore": quantization.get("exclude_modules", [])} if where == "inside" else {}
    return {"quant_method": "modelopt", "producer": producer, **inside, **ignore}


@pytest.mark.parametrize("where", ["inside", "beside", "both"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_modelopt_mixed(tmp_path: Path, where: str, shape: tuple[int, ...], caplog: pytest.LogCaptureFixture) -> None:
    """As NVIDIA's 27B: MLPs and head NVFP4, attention FP8 with one scale a tensor."""

    def encode(name: str, weight: Tensor) -> Encoded | None:
        if ".mlp." in name or name.startswith("lm_head"):
            return nvfp4(weight, shape)
        return per_tensor(weight, shape) if LINEAR.fullmatch(name) else None

    layers = {
        name.removesuffix(".weight"): {"quant_algo": "FP8"} if "_attn" in name else {"quant_algo": "NVFP4"}
        for name in tiny("dense").state_dict()
        if LINEAR.fullmatch(name) or name.startswith("lm_head")
    }
    config = modelopt_config(where, tmp_path, quant_algo="MIXED_PRECISION", quantized_layers=layers)
    with caplog.at_level(logging.WARNING):
        written = write(tmp_path, "dense", encode, config, "model.language_model.")
        formats = {".mlp.": "nvfp4", "lm_head": "nvfp4", **dict.fromkeys(FP8_MODULES, "fp8")}
        source = check(tmp_path, written, formats)
    assert not caplog.records
    name = "model.layers.1.mlp.down_proj.weight"
    ours = source.encoded(name, 0, 256)
    assert isinstance(ours, Quantized)
    assert ours.scales is not None
    parts, _ = nvfp4(tiny("dense").state_dict()[name])
    assert torch.equal(ours.codes[:, 0::2] | ours.codes[:, 1::2] << 4, parts["weight"])
    assert torch.equal(ours.scales.view(torch.uint8), parts["weight_scale"].view(torch.uint8))
    assert torch.equal(ours.row_scale, parts["weight_scale_2"].expand(256))
    if where == "inside" and shape == ():
        assert_serves(tmp_path, "dense", written)


@pytest.mark.parametrize("one_by_one", [True, False])
def test_modelopt_experts(tmp_path: Path, one_by_one: bool, caplog: pytest.LogCaptureFixture) -> None:
    """As NVIDIA's 35B: the config names the experts as one module, whose tensors may be stacked or not."""

    def encode(name: str, weight: Tensor) -> Encoded | None:
        return nvfp4(weight) if ".experts." in name or "shared_expert." in name else None

    modules = ("experts", "shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj")
    algorithm = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    layers = {f"model.language_model.layers.{n}.mlp.{module}": algorithm for n in range(2) for module in modules}
    config = modelopt_config("both", tmp_path, quant_algo="MIXED_PRECISION", quantized_layers=layers)
    with caplog.at_level(logging.WARNING):
        written = write(tmp_path, "moe", encode, config, one_by_one=one_by_one)
        check(tmp_path, written, {".experts.": "nvfp4", "shared_expert.": "nvfp4"})
    assert not caplog.records
    assert_serves(tmp_path, "moe", written)


def test_modelopt_fp8_blocks_and_rows(tmp_path: Path) -> None:
    """FP8_PB_WO: scales of rank 4. FP8_PER_CHANNEL_PER_TOKEN: one a row."""

    def encode(name: str, weight: Tensor) -> Encoded | None:
        if "self_attn" in name and LINEAR.fullmatch(name):
            return per_row(weight)
        if ".mlp." not in name:
            return None
        parts, values = blocks(weight, torch.float32)
        return {"weight": parts["weight"], "weight_scale": parts["weight_scale_inv"][:, None, :, None]}, values

    layers = {f"model.layers.{n}.mlp": {"quant_algo": "FP8_PB_WO"} for n in range(2)}
    layers["model.layers.1.self_attn"] = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    config = modelopt_config("inside", tmp_path, quant_algo="MIXED_PRECISION", quantized_layers=layers)
    written = write(tmp_path, "dense", encode, config)
    check(tmp_path, written, {".mlp.": "fp8-block", "q_proj": "fp8", "k_proj": "fp8", "v_proj": "fp8", "o_proj": "fp8"})


def test_what_modelopt_leaves_out() -> None:
    declared = read_modelopt(
        {"quant_algo": "NVFP4"}, {"exclude_modules": ["lm_head", "model.layers.*.mlp.gate", "mtp*"]}
    )
    assert [scheme.bits for scheme in declared.schemes("model.layers.3.mlp.down_proj")] == [4]
    for module in ("lm_head", "model.layers.3.mlp.gate", "mtp.layers.0.mlp.up_proj", "mtp.fc"):
        assert not declared.schemes(module)
