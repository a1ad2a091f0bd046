"""Folders of the Qwen3.5 family with random weights, without transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from services.engine.model.family import build_decoder, parse_model_config
from services.engine.model.matrix import MatrixSlot, Place
from services.engine.model.mtp import MtpHead
from services.engine.model.qwen3_5 import HybridDecoder

_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 160,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
_EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}


def random_folder(folder: Path, moe: bool = False, apart: bool = False, **changes: Any) -> dict[str, Tensor]:
    """Writes bf16 weights (A_log float32) and all that a model needs; returns the weights. `apart`: each expert by
    itself."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**_CONFIG, **(_EXPERTS if moe else {}), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": 2}))
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    weights = {}
    generator = torch.Generator().manual_seed(0)
    for place in _places(config, apart):
        shape = place.shape if isinstance(place, MatrixSlot) else tuple(place.target.shape)
        values = torch.randn(shape, generator=generator) * 0.1
        weights[place.name] = values.to(torch.float32 if place.name.endswith("A_log") else torch.bfloat16)
    save_file(weights, folder / "model.safetensors")
    return weights


def _places(config: dict[str, Any], apart: bool) -> list[Place]:
    decoder = build_decoder(parse_model_config(config), torch.bfloat16, torch.device("cpu"))
    assert isinstance(decoder, HybridDecoder)
    found: list[Place] = []
    for place in (*decoder.slots(), *(MtpHead(decoder).slots() if config["mtp_num_hidden_layers"] else ())):
        found += place.parts if apart and isinstance(place, MatrixSlot) and place.parts else (place,)
    return found
