"""What a decoder must know of a model, from GGUF metadata."""

from collections.abc import Mapping, Set
from typing import Any

import torch

from services.engine.model.config import ARCHITECTURES, ModelConfig, ModelError, Rope
from services.engine.model.family import DecoderConfig
from services.engine.model.hybrid_config import DeltaNetConfig, ExpertsConfig, HybridConfig, LayerType
from services.engine.weights.gguf_file import GgufFile
from services.engine.weights.gguf_names import ROPE_FACTORS

_HYBRID = {"qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe"}
"""llama.cpp's name -> that of `transformers`."""
_KNOWN = (*ARCHITECTURES, *_HYBRID)
_VISION = "clip"
_INTERVAL = 4


def parse_config(file: GgufFile) -> DecoderConfig:
    """Raises ModelError naming the key that is missing or that we cannot honour."""
    architecture = file.metadata.get("general.architecture")
    if architecture == _VISION:
        raise ModelError("this is the vision part of a model (mmproj); expected the file with the language model")
    if architecture not in _KNOWN:
        raise ModelError(f"general.architecture {architecture!r} is not supported; known: {', '.join(_KNOWN)}")
    keys = _Keys(file.metadata, architecture)
    return _hybrid(file, keys, _HYBRID[architecture]) if architecture in _HYBRID else _dense(file, keys, architecture)


class _Keys:
    """Metadata of one architecture."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._prefix = architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self._prefix}.{key}", default)

    def required(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"metadata {self._prefix}.{key} is missing")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.required(key) if default is None else self.get(key, default)
        if not isinstance(value, int):
            raise ModelError(f"metadata {self._prefix}.{key} is {str(value)[:80]}; expected one whole number")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.whole(key, default)
        if value < 1:
            raise ModelError(f"metadata {self._prefix}.{key} is {value}; it must be positive")
        return value

    def refuse(self, *keys: str) -> None:
        for key in keys:
            if self.get(key):
                raise ModelError(f"metadata {self._prefix}.{key} = {self.get(key)!r} is not supported")


def _dense(file: GgufFile, keys: _Keys, architecture: str) -> ModelConfig:
    keys.refuse("expert_count", "logit_scale", "embedding_scale", "residual_scale", "attention.scale")
    context = keys.whole("context_length")
    if 0 < (keys.get("attention.sliding_window") or 0) < context:
        keys.refuse("attention.sliding_window")
    heads = keys.positive("attention.head_count")
    hidden = keys.whole("embedding_length")
    head_dim = keys.get("attention.key_length") or hidden // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, head_dim) != head_dim:
            raise ModelError(f"{architecture}.{key} is {keys.get(key)}; only the head's {head_dim} dims are supported")
    names: Set[str] = file.tensors.keys()
    return ModelConfig(
        architecture=architecture,
        vocab_size=_rows(file, "token_embd.weight"),
        hidden_size=hidden,
        intermediate_size=keys.whole("feed_forward_length"),
        layers=keys.whole("block_count"),
        heads=heads,
        kv_heads=keys.positive("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=float(keys.required("attention.layer_norm_rms_epsilon")),
        rope=_rope(file, keys, head_dim),
        context_length=context,
        qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in names,
        output_bias="blk.0.attn_output.bias" in names,
        qk_norm=architecture == "qwen3",
        tied_head="output.weight" not in names,
    )


def _hybrid(file: GgufFile, keys: _Keys, architecture: str) -> HybridConfig:
    keys.refuse("logit_scale", "embedding_scale", "residual_scale", "attention.scale", "attention.sliding_window")
    if keys.get("rope.scaling.type", "none") != "none":
        keys.refuse("rope.scaling.type")
    drafting = keys.whole("nextn_predict_layers", 0)
    if drafting not in (0, 1):
        keys.refuse("nextn_predict_layers")
    head_dim = keys.positive("attention.key_length")
    if keys.get("attention.value_length", head_dim) != head_dim:
        keys.refuse("attention.value_length")
    value_heads = keys.positive("ssm.time_step_rank")
    inner = keys.positive("ssm.inner_size")
    if inner % value_heads:
        raise ModelError(f"ssm.inner_size is {inner}; {value_heads} heads of ssm.time_step_rank cannot share it evenly")
    layers = keys.whole("block_count") - drafting
    return HybridConfig(
        architecture=architecture,
        vocab_size=_rows(file, "token_embd.weight"),
        hidden_size=keys.whole("embedding_length"),
        layer_types=_layer_types(keys, layers),
        heads=keys.positive("attention.head_count"),
        kv_heads=_kv_heads(keys),
        head_dim=head_dim,
        rotary_dim=keys.positive("rope.dimension_count"),
        rope_theta=float(keys.required("rope.freq_base")),
        delta_net=DeltaNetConfig(
            key_heads=keys.positive("ssm.group_count"),
            value_heads=value_heads,
            key_dim=keys.positive("ssm.state_size"),
            value_dim=inner // value_heads,
            conv_width=keys.positive("ssm.conv_kernel"),
        ),
        mlp=_experts(keys) if architecture == "qwen3_5_moe" else keys.whole("feed_forward_length"),
        rms_norm_eps=float(keys.required("attention.layer_norm_rms_epsilon")),
        context_length=keys.whole("context_length"),
        tied_head="output.weight" not in file.tensors,
        mtp=bool(drafting),
    )


def _experts(keys: _Keys) -> ExpertsConfig:
    width = keys.whole("expert_feed_forward_length")
    return ExpertsConfig(
        count=keys.whole("expert_count"),
        chosen=keys.whole("expert_used_count"),
        width=width,
        shared_width=keys.whole("expert_shared_feed_forward_length", width),
    )


def _layer_types(keys: _Keys, layers: int) -> tuple[LayerType, ...]:
    named = keys.get("attention.recurrent_layers")
    if isinstance(named, list):
        if len(named) < layers:
            raise ModelError(f"attention.recurrent_layers has {len(named)} entries for {layers} layers")
        recurrent = [bool(value) for value in named[:layers]]
    else:
        interval = keys.positive("full_attention_interval", _INTERVAL)
        recurrent = [(layer + 1) % interval != 0 for layer in range(layers)]
    return tuple("linear_attention" if value else "full_attention" for value in recurrent)


def _kv_heads(keys: _Keys) -> int:
    """One number, or one a layer with 0 where a layer has a state instead."""
    value = keys.required("attention.head_count_kv")
    counts = set(value) - {0} if isinstance(value, list) else {value}
    if len(counts) != 1:
        raise ModelError(f"attention.head_count_kv names {sorted(counts)} heads; expected one number for all layers")
    return counts.pop()


def _rows(file: GgufFile, name: str) -> int:
    if name not in file.tensors:
        raise ModelError(f"tensor {name} is missing")
    return file.tensors[name].shape[0]


def _rope(file: GgufFile, keys: _Keys, head_dim: int) -> Rope:
    theta = float(keys.get("rope.freq_base", 10_000.0))
    kind = keys.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        keys.refuse("rope.scaling.type")
    divisors = torch.ones(head_dim // 2)
    if kind == "linear":
        divisors *= float(keys.required("rope.scaling.factor"))
    if ROPE_FACTORS in file.tensors:  # how the converter stores Llama 3's scaling
        shape = file.tensors[ROPE_FACTORS].shape
        if shape != (head_dim // 2,):
            raise ModelError(f"tensor {ROPE_FACTORS} has the shape {list(shape)}; expected [{head_dim // 2}]")
        divisors *= file.values(file.tensors[ROPE_FACTORS]).flatten()
    return Rope(theta, () if bool((divisors == 1).all()) else tuple(divisors.tolist()))
