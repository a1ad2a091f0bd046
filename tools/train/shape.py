"""The sizes of a small Qwen3.5 model, and its `config.json`."""

from dataclasses import dataclass
from typing import Any

FULL_ATTENTION_EVERY = 4
"""Layers 3, 7, ... are full attention, the others gated delta net."""
CONV_WIDTH = 4
RMS_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Defaults: samovar-tiny. The embedding is also the output head; one MTP layer."""

    vocab_size: int = 4096
    hidden_size: int = 256
    layers: int = 8
    intermediate_size: int = 640
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    """A quarter of it rotates."""
    key_heads: int = 2
    """Gated delta net: query/key heads,"""
    value_heads: int = 4
    """value heads (a multiple of them),"""
    delta_head_dim: int = 64
    """and the width of both."""
    rope_theta: float = 1e7

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.value_heads % self.key_heads:
            raise ValueError("query heads must be a multiple of K/V heads, value heads of key heads")
        if self.head_dim % 8:
            raise ValueError(f"head_dim is {self.head_dim}; a quarter of it must be an even number of dims")

    @property
    def rotary_dims(self) -> int:
        return self.head_dim // 4

    @property
    def key_width(self) -> int:
        return self.key_heads * self.delta_head_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.delta_head_dim

    def is_full_attention(self, layer: int) -> bool:
        return layer % FULL_ATTENTION_EVERY == FULL_ATTENTION_EVERY - 1

    def hf_config(self) -> dict[str, Any]:
        """`config.json` of the model type `qwen3_5_text`; the last nine ids of the vocabulary are the added tokens."""
        pairs = self.rotary_dims // 2
        height, width = (pairs * 3) // 8, pairs // 4
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.delta_head_dim,
            "linear_value_head_dim": self.delta_head_dim,
            "linear_conv_kernel_dim": CONV_WIDTH,
            "full_attention_interval": FULL_ATTENTION_EVERY,
            "hidden_act": "silu",
            "layer_types": [
                "full_attention" if self.is_full_attention(i) else "linear_attention" for i in range(self.layers)
            ],
            "max_position_embeddings": 262144,
            "rms_norm_eps": RMS_NORM_EPS,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "attn_output_gate": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [pairs - height - width, height, width],
            },
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "mamba_ssm_dtype": "float32",
            "dtype": "bfloat16",
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": self.vocab_size - 7,
            "pad_token_id": self.vocab_size - 9,
            "transformers_version": "5.17.0",
        }

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> "ModelShape":
        """The inverse of `hf_config`. Raises ValueError for a config that this code does not train."""
        shape = cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            layers=config["num_hidden_layers"],
            intermediate_size=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            key_heads=config["linear_num_key_heads"],
            value_heads=config["linear_num_value_heads"],
            delta_head_dim=config["linear_key_head_dim"],
            rope_theta=float(config["rope_parameters"]["rope_theta"]),
        )
        for key, expected in shape.hf_config().items():
            if key != "transformers_version" and config.get(key) != expected:
                raise ValueError(f"config.json: {key} is {config.get(key)!r}, but this code trains {expected!r}")
        return shape
