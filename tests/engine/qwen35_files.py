"""GGUF files of the Qwen3.5 family as llama.cpp's converter lays them out (conversion/qwen.py), from tensors named as
`transformers` names them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from services.engine.model.hybrid_config import ExpertsConfig, HybridConfig
from tests.engine import gguf_files
from tests.engine.gguf_blocks import random_blocks

Arrays = dict[str, np.ndarray]

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
MTP = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}


def tile(values: np.ndarray, axis: int, config: HybridConfig, width: int) -> np.ndarray:
    """Value heads from the order of their key heads to the one in which key heads repeat."""
    net = config.delta_net
    heads = (net.key_heads, net.value_heads // net.key_heads, width)
    split = values.reshape(*values.shape[:axis], *heads, *values.shape[axis + 1 :])
    return split.swapaxes(axis, axis + 1).reshape(values.shape)


def convert(name: str, values: np.ndarray, config: HybridConfig) -> Arrays:
    """Stored name -> stored values, as the converter makes them of one tensor."""
    net = config.delta_net
    if name.endswith("A_log"):
        values = -np.exp(values)
    elif "norm" in name.split(".")[-2] and not name.endswith("linear_attn.norm.weight"):
        values = values + 1
    if "conv1d" in name:
        values = values.reshape(values.shape[0], -1)
    if ".in_proj_qkv." in name or ".conv1d." in name:
        first = 2 * net.key_heads * net.key_dim
        values = np.concatenate([values[:first], tile(values[first:], 0, config, net.value_dim)])
    elif ".in_proj_z." in name:
        values = tile(values, 0, config, net.value_dim)
    elif ".in_proj_a." in name or ".in_proj_b." in name or name.endswith(("A_log", "dt_bias")):
        values = tile(values, 0, config, 1)
    elif ".out_proj." in name:
        values = tile(values, 1, config, net.value_dim)
    if name.endswith("shared_expert_gate.weight"):
        values = values[0]

    part, _, kind = name.rpartition(".")
    if part in TOP:
        return {f"{TOP[part]}.{kind}": values}
    if part.startswith("mtp.") and part.removeprefix("mtp.") in MTP:
        return {f"blk.{len(config.layer_types)}.nextn.{MTP[part.removeprefix('mtp.')]}.{kind}": values}
    match = re.fullmatch(r"(model|mtp)\.layers\.(\d+)\.(.+)", part)
    assert match is not None, name
    block = f"blk.{int(match[2]) + (len(config.layer_types) if match[1] == 'mtp' else 0)}"
    if name.endswith("A_log"):
        return {f"{block}.ssm_a": values}
    if name.endswith("dt_bias"):
        return {f"{block}.ssm_dt.bias": values}
    if name.endswith("experts.gate_up_proj"):
        gates, ups = np.split(values, 2, axis=1)
        return {f"{block}.ffn_gate_exps.weight": gates, f"{block}.ffn_up_exps.weight": ups}
    if name.endswith("experts.down_proj"):
        return {f"{block}.ffn_down_exps.weight": values}
    return {f"{block}.{NAMES[match[3]]}.{kind}": values}


def metadata(config: HybridConfig) -> dict[str, Any]:
    net = config.delta_net
    interval = config.layer_types.index("full_attention") + 1
    entries: dict[str, Any] = {
        "block_count": len(config.layer_types) + config.mtp,
        "context_length": config.context_length,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "full_attention_interval": interval,
        "rope.freq_base": config.rope_theta,
        "rope.dimension_count": config.rotary_dim,
        "rope.dimension_sections": [11, 11, 10, 0],
        "ssm.conv_kernel": net.conv_width,
        "ssm.state_size": net.key_dim,
        "ssm.group_count": net.key_heads,
        "ssm.time_step_rank": net.value_heads,
        "ssm.inner_size": net.value_heads * net.value_dim,
    }
    if config.mtp:
        entries["nextn_predict_layers"] = 1
    if isinstance(config.mlp, ExpertsConfig):
        entries |= {
            "expert_count": config.mlp.count,
            "expert_used_count": config.mlp.chosen,
            "expert_feed_forward_length": config.mlp.width,
            "expert_shared_feed_forward_length": config.mlp.shared_width,
        }
    else:
        entries["feed_forward_length"] = config.mlp
    return entries


def write(
    path: Path,
    config: HybridConfig,
    tensors: Mapping[str, Tensor],
    types: Mapping[str, Kind] | None = None,
    entries: Mapping[str, Any] | None = None,
    without: str = "nothing",
    further: Mapping[str, np.ndarray] | None = None,
    architecture: str | None = None,
) -> Arrays:
    """Returns what the file holds: float32 by stored name. `types`: for the end of stored names, the first that fits;
    a type that the package does not encode gets random values. `entries`: further or other metadata, None leaves one
    out. `without`: a regular expression over stored names; `further`: tensors beside, by stored name."""
    name = architecture or ("qwen35moe" if isinstance(config.mlp, ExpertsConfig) else "qwen35")
    writer = gguf.GGUFWriter(path, name)
    whole = {f"{name}.{key}": value for key, value in metadata(config).items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": gguf_files.VOCABULARY,
        "tokenizer.ggml.token_type": gguf_files.TYPES,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 95,
    }
    for key, value in {**whole, **(entries or {})}.items():
        gguf_files.add(writer, key, value)
    for stored, values in (further or {}).items():
        writer.add_tensor(stored, values)
    held: Arrays = {}
    for ours, tensor in tensors.items():
        if ours == "lm_head.weight" and config.tied_head:
            continue
        for stored, values in convert(ours, tensor.float().numpy(), config).items():
            if re.search(without, stored):
                continue
            values = np.ascontiguousarray(values)
            kind = next((kind for end, kind in (types or {}).items() if stored.endswith(end)), Kind.F32)
            if kind == Kind.F32:
                writer.add_tensor(stored, values)
                held[stored] = values
                continue
            try:
                raw = gguf.quants.quantize(values, kind)
            except NotImplementedError:
                rows = int(np.prod(values.shape[:-1]))
                raw = random_blocks(kind, rows, values.shape[-1], seed=len(held)).reshape(*values.shape[:-1], -1)
            writer.add_tensor(stored, raw, raw_dtype=kind)
            held[stored] = gguf.quants.dequantize(raw, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def restored(config: HybridConfig, tensors: Mapping[str, Tensor], held: Arrays) -> dict[str, np.ndarray]:
    """The values of the file in the order of `transformers`, found by sending the places of each tensor through the
    converter; norms and decays as they are."""
    result = {}
    for ours, tensor in tensors.items():
        if "norm" in ours or ours.endswith("A_log") or (ours == "lm_head.weight" and config.tied_head):
            continue
        places = np.arange(tensor.numel(), dtype=np.float64).reshape(tensor.shape)
        values = np.empty(tensor.numel(), dtype=np.float32)
        for stored, moved in convert(ours, places, config).items():
            values[moved.astype(np.int64).reshape(-1)] = held[stored].reshape(-1)
        result[ours] = values.reshape(tensor.shape)
    return result
