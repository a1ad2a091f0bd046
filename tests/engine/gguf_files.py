"""GGUF files of tiny models, written with the gguf package the way llama.cpp's converter does."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
VOCABULARY = [chr(33 + n) for n in range(94)] + ["<|im_start|>", "<|im_end|>", "Ġ"]
"""97 byte-level tokens."""
TYPES = [1] * 94 + [3, 3, 1]


def stored_name(name: str) -> str:
    part, kind = name.rsplit(".", 1)
    if part in TOP_NAMES:
        return f"{TOP_NAMES[part]}.{kind}"
    _, _, layer, part = part.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"


def interleave(weights: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of convert_hf_to_gguf.py."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    config = model.config
    found = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.float().numpy()
        if config.model_type == "llama" and ".q_proj." in name:
            values = interleave(values, config.num_attention_heads)
        if config.model_type == "llama" and ".k_proj." in name:
            values = interleave(values, config.num_key_value_heads)
        found[stored_name(name)] = values
    return found


def write(
    path: Path,
    model: PreTrainedModel,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    without: Iterable[str] = (),
    replaced: Mapping[str, np.ndarray] | None = None,
    raw: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    architecture: str | None = None,
) -> Path:
    """Matrices in `kind`, vectors in F32. `raw`: blocks as they are, [rows, bytes]. `metadata`: further or other
    entries, None leaves one out."""
    config = model.config
    name = architecture or config.model_type
    entries: dict[str, Any] = {
        f"{name}.block_count": config.num_hidden_layers,
        f"{name}.context_length": config.max_position_embeddings,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.feed_forward_length": config.intermediate_size,
        f"{name}.attention.head_count": config.num_attention_heads,
        f"{name}.attention.head_count_kv": config.num_key_value_heads,
        f"{name}.attention.key_length": config.head_dim,
        f"{name}.attention.value_length": config.head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{name}.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": VOCABULARY,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 95,
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, name)
    for key, value in entries.items():
        add(writer, key, value)
    for key, (blocks, type_) in (raw or {}).items():
        writer.add_tensor(key, blocks, raw_dtype=type_)
    for key, values in {**tensors(model), **(replaced or {})}.items():
        if key in without or key in (raw or {}):
            continue
        if values.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(key, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def dequantized(path: Path, model: PreTrainedModel) -> PreTrainedModel:
    """The oracle with the values that the file really holds, decoded by the gguf package's own reader."""
    config = model.config
    values = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors
    }
    state = {}
    for name, weight in model.state_dict().items():
        stored = stored_name(name)
        array = values[stored] if stored in values else values["token_embd.weight"]
        if config.model_type == "llama" and ".q_proj." in name:
            array = deinterleave(array, config.num_attention_heads)
        if config.model_type == "llama" and ".k_proj." in name:
            array = deinterleave(array, config.num_key_value_heads)
        state[name] = torch.tensor(array.reshape(weight.shape))
    model.load_state_dict(state)
    return model


def deinterleave(weights: np.ndarray, heads: int) -> np.ndarray:
    return (
        weights.reshape(heads, weights.shape[0] // heads // 2, 2, *weights.shape[1:])
        .swapaxes(2, 1)
        .reshape(weights.shape)
    )
