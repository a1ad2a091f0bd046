"""What the hybrid decoder of the Qwen3.5 family must know of a model. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from services.engine.model.config import ModelError, required

ARCHITECTURES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
LayerType = Literal["linear_attention", "full_attention"]

_ROTARY_SHARE = 0.25
_FULL_ATTENTION_INTERVAL = 4
_ROPE_TYPES = ("default", "mrope")


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """A gated delta net layer: depthwise causal convolution, then the gated delta rule."""

    key_heads: int
    value_heads: int
    """Value head h uses key head h * key_heads // value_heads."""
    key_dim: int
    value_dim: int
    """Of a head."""
    conv_width: int

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ModelError(f"linear attention has {name} {getattr(self, name)}; it must be positive")
        if self.conv_width < 2:
            raise ModelError(f"linear_conv_kernel_dim is {self.conv_width}; it must be at least 2")
        if self.value_heads % self.key_heads:
            raise ModelError(
                f"linear_num_value_heads is {self.value_heads}; {self.key_heads} key heads cannot serve them evenly"
            )

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts: some of many routed ones, and one that sees every token."""

    count: int
    chosen: int
    """Per token."""
    width: int
    shared_width: int

    def __post_init__(self) -> None:
        if min(self.count, self.width, self.shared_width) < 1:
            raise ModelError(
                f"num_experts {self.count}, moe_intermediate_size {self.width} and shared_expert_intermediate_size "
                f"{self.shared_width} must be positive"
            )
        if not 1 <= self.chosen <= self.count:
            raise ModelError(f"num_experts_per_tok is {self.chosen}; expected 1 to {self.count}")


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """Gated delta net and gated full attention, layer by layer; SwiGLU or experts behind each."""

    architecture: str
    """`qwen3_5` or `qwen3_5_moe`: for names and messages."""
    vocab_size: int
    """Rows of the embedding; the tokenizer may know fewer ids."""
    hidden_size: int
    layer_types: tuple[LayerType, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    """The first dims of a head that the rotary embedding turns."""
    rope_theta: float
    delta_net: DeltaNetConfig
    mlp: int | ExpertsConfig
    """Width of the SwiGLU, or the experts in its place."""
    rms_norm_eps: float
    context_length: int
    """Positions that the model was made for."""
    tied_head: bool = False
    """The output head is the embedding."""
    mtp: bool = False
    """The model was trained with a head for multi-token prediction; the weights may lack it nevertheless."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "heads", "kv_heads", "head_dim", "context_length"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}; it must be positive")
        if isinstance(self.mlp, int) and self.mlp < 1:
            raise ModelError(f"intermediate_size is {self.mlp}; it must be positive")
        if "full_attention" not in self.layer_types or "linear_attention" not in self.layer_types:
            raise ModelError(f"the {len(self.layer_types)} layers must be of both types, linear and full attention")
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} query heads cannot share {self.kv_heads} K/V heads evenly")
        if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            raise ModelError(f"{self.rotary_dim} of {self.head_dim} dims would rotate; expected an even number of them")

    @property
    def attention_layers(self) -> int:
        """Those with K and V."""
        return self.layer_types.count("full_attention")

    @property
    def delta_net_layers(self) -> int:
        """Those with a state."""
        return self.layer_types.count("linear_attention")


def parse_hybrid_config(raw: Mapping[str, Any]) -> HybridConfig:
    """A `config.json` of `transformers` with one of ARCHITECTURES as model_type; the vision part is not looked at.
    Raises ModelError naming the key that we cannot honour."""
    nested = raw.get("text_config")
    text: Mapping[str, Any] = nested if isinstance(nested, Mapping) else raw
    for key in ("quantization_config", "attention_bias"):
        for source in (raw, text):
            if source.get(key):
                raise ModelError(f"{key} = {source[key]!r} is not supported")
    if text.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act = {text['hidden_act']!r} is not supported")
    head_dim = required(text, "head_dim", int)
    theta, share = _rope(raw, text)
    moe = required(raw, "model_type", str).startswith("qwen3_5_moe")
    return HybridConfig(
        architecture="qwen3_5_moe" if moe else "qwen3_5",
        vocab_size=required(text, "vocab_size", int),
        hidden_size=required(text, "hidden_size", int),
        layer_types=_layer_types(text),
        heads=required(text, "num_attention_heads", int),
        kv_heads=required(text, "num_key_value_heads", int),
        head_dim=head_dim,
        rotary_dim=int(head_dim * share),
        rope_theta=theta,
        delta_net=DeltaNetConfig(
            key_heads=required(text, "linear_num_key_heads", int),
            value_heads=required(text, "linear_num_value_heads", int),
            key_dim=required(text, "linear_key_head_dim", int),
            value_dim=required(text, "linear_value_head_dim", int),
            conv_width=required(text, "linear_conv_kernel_dim", int),
        ),
        mlp=_experts(text) if moe else required(text, "intermediate_size", int),
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        context_length=required(text, "max_position_embeddings", int),
        tied_head=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        mtp=_mtp(text),
    )


def _experts(text: Mapping[str, Any]) -> ExpertsConfig:
    return ExpertsConfig(
        count=required(text, "num_experts", int),
        chosen=required(text, "num_experts_per_tok", int),
        width=required(text, "moe_intermediate_size", int),
        shared_width=required(text, "shared_expert_intermediate_size", int),
    )


def _layer_types(text: Mapping[str, Any]) -> tuple[LayerType, ...]:
    count = required(text, "num_hidden_layers", int)
    named = text.get("layer_types")
    if named is None:
        interval = text.get("full_attention_interval", _FULL_ATTENTION_INTERVAL)
        if not isinstance(interval, int) or interval < 1:
            raise ModelError(f"full_attention_interval is {interval!r}; expected a positive whole number")
        return tuple("linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(count))
    if not isinstance(named, Sequence) or len(named) != count:
        raise ModelError(f"layer_types does not name the {count} layers of num_hidden_layers")
    types: list[LayerType] = []
    for layer, kind in enumerate(named):
        if kind not in ("linear_attention", "full_attention"):
            raise ModelError(
                f"layer_types[{layer}] = {kind!r} is not supported; known: linear_attention, full_attention"
            )
        types.append(kind)
    return tuple(types)


def _rope(raw: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[float, float]:
    """theta and the share of a head's dims that rotate: from rope_parameters, else from older files' flat keys."""
    parameters = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _ROPE_TYPES:
        raise ModelError(f"rope_parameters.rope_type = {kind!r} is not supported; known: {', '.join(_ROPE_TYPES)}")

    def value(key: str) -> Any:
        return next((source[key] for source in (parameters, text, raw) if source.get(key) is not None), None)

    theta, share = value("rope_theta"), value("partial_rotary_factor")
    if not isinstance(theta, int | float) or theta <= 0:
        raise ModelError(f"rope_theta is {theta!r}; expected a positive number")
    if share is None:
        share = _ROTARY_SHARE
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise ModelError(f"partial_rotary_factor is {share!r}; expected a number above 0, at most 1")
    return float(theta), float(share)


def _mtp(text: Mapping[str, Any]) -> bool:
    count = text.get("mtp_num_hidden_layers") or 0
    if count not in (0, 1):
        raise ModelError(f"mtp_num_hidden_layers is {count!r}; expected 0 or 1")
    if count and text.get("mtp_use_dedicated_embeddings"):
        raise ModelError("mtp_use_dedicated_embeddings = true is not supported")
    return bool(count)
