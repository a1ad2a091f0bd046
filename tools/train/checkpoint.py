"""Parameters by their names in a checkpoint: fresh ones, and a model folder read and written."""

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.train.shape import CONV_WIDTH, ModelShape

Parameters = dict[str, Tensor]

COPIED_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
"""What a model folder takes from the one before it."""


def initial_parameters(shape: ModelShape, seed: int) -> Parameters:
    """Fresh float32 parameters on the CPU. Norm weights are stored as (w - 1), but the delta net's gated norm as w."""
    generator = torch.Generator().manual_seed(seed)
    parameters: Parameters = {}

    def normal(*size: int, deviation: float) -> Tensor:
        return torch.randn(*size, generator=generator) * deviation

    def uniform(size: int, low: float, high: float) -> Tensor:
        return torch.rand(size, generator=generator) * (high - low) + low

    def linear(name: str, outputs: int, inputs: int, scale: float = 1.0) -> None:
        parameters[name + ".weight"] = normal(outputs, inputs, deviation=0.5 * scale / math.sqrt(inputs))

    def norm(name: str, width: int) -> None:
        parameters[name + ".weight"] = torch.zeros(width)

    def attention(layer: str) -> None:
        width = shape.heads * shape.head_dim
        linear(layer + "self_attn.q_proj", 2 * width, shape.hidden_size)
        linear(layer + "self_attn.k_proj", shape.kv_heads * shape.head_dim, shape.hidden_size)
        linear(layer + "self_attn.v_proj", shape.kv_heads * shape.head_dim, shape.hidden_size)
        linear(layer + "self_attn.o_proj", shape.hidden_size, width, scale=0.1)
        norm(layer + "self_attn.q_norm", shape.head_dim)
        norm(layer + "self_attn.k_norm", shape.head_dim)

    def delta_net(layer: str) -> None:
        name = layer + "linear_attn."
        channels = 2 * shape.key_width + shape.value_width
        linear(name + "in_proj_qkv", channels, shape.hidden_size)
        linear(name + "in_proj_z", shape.value_width, shape.hidden_size)
        linear(name + "in_proj_b", shape.value_heads, shape.hidden_size)
        linear(name + "in_proj_a", shape.value_heads, shape.hidden_size)
        linear(name + "out_proj", shape.hidden_size, shape.value_width, scale=0.1)
        parameters[name + "conv1d.weight"] = normal(channels, 1, CONV_WIDTH, deviation=0.3)
        parameters[name + "norm.weight"] = torch.ones(shape.delta_head_dim)
        # Mamba's start: time steps log-uniform in [0.001, 0.1] through the inverse of softplus, decay rates over e^5.
        step = torch.exp(uniform(shape.value_heads, math.log(0.001), math.log(0.1)))
        parameters[name + "dt_bias"] = step + torch.log(-torch.expm1(-step))
        parameters[name + "A_log"] = uniform(shape.value_heads, -3.0, 2.0)

    def feed_forward(layer: str) -> None:
        linear(layer + "mlp.gate_proj", shape.intermediate_size, shape.hidden_size)
        linear(layer + "mlp.up_proj", shape.intermediate_size, shape.hidden_size)
        linear(layer + "mlp.down_proj", shape.hidden_size, shape.intermediate_size, scale=0.1)
        norm(layer + "input_layernorm", shape.hidden_size)
        norm(layer + "post_attention_layernorm", shape.hidden_size)

    parameters["model.embed_tokens.weight"] = normal(shape.vocab_size, shape.hidden_size, deviation=0.02)
    for index in range(shape.layers):
        layer = f"model.layers.{index}."
        if shape.is_full_attention(index):
            attention(layer)
        else:
            delta_net(layer)
        feed_forward(layer)
    norm("model.norm", shape.hidden_size)
    attention("mtp.layers.0.")
    feed_forward("mtp.layers.0.")
    linear("mtp.fc", shape.hidden_size, 2 * shape.hidden_size)
    for name in ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"):
        norm(name, shape.hidden_size)
    return parameters


def stored(name: str, value: Tensor) -> Tensor:
    """As the file keeps it: bf16, but the delta net's decay rates in float32, as the family does."""
    return value.detach().to(torch.float32 if name.endswith("A_log") else torch.bfloat16).cpu().contiguous()


def save_model(folder: Path, shape: ModelShape, parameters: Parameters, files_from: Path) -> None:
    """A complete model folder. What training does not change (COPIED_FILES) comes from `files_from`, if it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: stored(name, value) for name, value in parameters.items()}
    partial = folder / "model.safetensors.partial"
    save_file(weights, str(partial), metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(shape.hf_config(), indent=2) + "\n")
    for name in COPIED_FILES:
        source = files_from / name
        if source.is_file() and source.resolve() != (folder / name).resolve():
            shutil.copyfile(source, folder / name)


def load_model(folder: Path) -> tuple[ModelShape, Parameters]:
    """Shape and float32 parameters of a folder that `save_model` wrote.

    Raises FileNotFoundError for a missing file, ValueError for a config of another family or tensors that do not fit.
    """
    shape = ModelShape.from_hf_config(json.loads((folder / "config.json").read_text()))
    path = folder / "model.safetensors"
    parameters = {name: value.float() for name, value in load_file(str(path)).items()}
    expected = {name: tuple(value.shape) for name, value in initial_parameters(shape, 0).items()}
    found = {name: tuple(value.shape) for name, value in parameters.items()}
    if found != expected:
        name = sorted(set(found.items()) ^ set(expected.items()))[0][0]
        raise ValueError(f"{path}: {name} has shape {found.get(name)}, expected {expected.get(name)}")
    return shape, parameters
