"""What the dense decoder must know of a model, read from either file format. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = ("llama", "qwen2", "qwen3")


class ModelError(ValueError):
    """A model that cannot be served; the message names the file or key, what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: pair i of a head turns by position * theta^(-2i / head_dim) / divisors[i] radians."""

    theta: float
    divisors: tuple[float, ...] = ()
    """head_dim / 2 of them; none: all 1. Both linear and Llama 3's scaling of the context are of this form."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family: RMS norm before attention and MLP, rotary embedding, SwiGLU, no dropout."""

    architecture: str
    """One of ARCHITECTURES: for names and messages, all differences are in the fields below."""
    vocab_size: int
    """Rows of the embedding; the tokenizer may know fewer ids."""
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    context_length: int
    """Positions that the model was made for."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Of the attention's output projection."""
    qk_norm: bool = False
    """RMS norm over each head of q and k, before the rotation (Qwen3)."""
    tied_head: bool = False
    """The output head is the embedding."""

    @property
    def attention_layers(self) -> int:
        """Those with K and V: all."""
        return self.layers

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ModelError(f"architecture {self.architecture!r} is not supported; known: {', '.join(ARCHITECTURES)}")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.context_length < 1:
            raise ModelError(f"context_length is {self.context_length}; it must be positive")
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} query heads cannot share {self.kv_heads} K/V heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}; rotary embedding needs an even one")
        if self.rope.divisors and len(self.rope.divisors) != self.head_dim // 2:
            raise ModelError(f"{len(self.rope.divisors)} rope factors for heads of {self.head_dim} dims")


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """A `config.json` of `transformers` (4 or 5). Raises ModelError naming the key that we cannot honour."""
    architecture = required(raw, "model_type", str)
    if architecture not in ARCHITECTURES:
        raise ModelError(f"model_type {architecture!r} is not supported; known: {', '.join(ARCHITECTURES)}")
    _refuse_unsupported(raw)
    heads = required(raw, "num_attention_heads", int)
    hidden = required(raw, "hidden_size", int)
    head_dim = raw.get("head_dim") or (128 if architecture == "qwen3" else hidden // heads)
    context = required(raw, "max_position_embeddings", int)
    bias = architecture == "qwen2" or bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=required(raw, "vocab_size", int),
        hidden_size=hidden,
        intermediate_size=required(raw, "intermediate_size", int),
        layers=required(raw, "num_hidden_layers", int),
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw, head_dim),
        context_length=context,
        qkv_bias=bias,
        output_bias=bias and architecture != "qwen2",
        qk_norm=architecture == "qwen3",
        tied_head=bool(raw.get("tie_word_embeddings", False)),
    )


def required(raw: Mapping[str, Any], key: str, kind: type) -> Any:
    """Raises ModelError when the key is missing or of another type."""
    value = raw.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ModelError(f"{key} is {value!r}; expected {'text' if kind is str else 'a whole number'}")
    return value


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    def refuse(key: str) -> None:
        raise ModelError(f"{key} = {raw[key]!r} is not supported")

    if raw.get("hidden_act", "silu") != "silu":
        refuse("hidden_act")
    for key in ("mlp_bias", "quantization_config"):
        if raw.get(key):
            refuse(key)
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        refuse("layer_types")
    if raw.get("use_sliding_window") and (raw.get("sliding_window") or 0) < raw.get("max_position_embeddings", 0):
        refuse("use_sliding_window")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        refuse("partial_rotary_factor")


def _rope(raw: Mapping[str, Any], head_dim: int) -> Rope:
    # transformers 4 has rope_theta and rope_scaling, 5 puts both into rope_parameters.
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    scaling = raw.get(key) or {}
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{key}.partial_rotary_factor = {scaling['partial_rotary_factor']!r} is not supported")
    try:
        if kind == "default":
            return Rope(theta)
        if kind == "linear":
            return Rope(theta, (float(scaling["factor"]),) * (head_dim // 2))
        if kind == "llama3":
            return Rope(theta, llama3_divisors(theta, head_dim, scaling))
    except KeyError as missing:
        raise ModelError(f"{key} of type {kind!r} has no {missing}") from None
    raise ModelError(f"{key}.rope_type = {kind!r} is not supported; known: default, linear, llama3")


def llama3_divisors(theta: float, head_dim: int, scaling: Mapping[str, Any]) -> tuple[float, ...]:
    """Llama 3.1's stretch of long wavelengths, as `transformers.modeling_rope_utils` computes it.

    Wavelengths (in tokens) up to context / high_freq_factor stay, those from context / low_freq_factor on grow by
    `factor`, and between them the frequency is interpolated. Raises KeyError naming a missing parameter.
    """
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    context = float(scaling["original_max_position_embeddings"])
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        smooth = (context / wavelength - low) / (high - low)
        kept = min(max(smooth, 0.0), 1.0)
        divisors.append(1.0 / ((1.0 - kept) / factor + kept))
    return tuple(divisors)
