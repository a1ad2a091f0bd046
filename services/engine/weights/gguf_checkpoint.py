"""A dense decoder in a GGUF file: its config, tensors and tokenizer under llama.cpp's names."""

import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.engine.model.config import ARCHITECTURES, ModelConfig, ModelError, Rope
from services.engine.weights.checkpoint import WeightFile
from services.engine.weights.gguf_file import GgufFile
from services.engine.weights.gguf_tokenizer import read_bundle
from services.protocol.events import TokenizerBundle

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP = re.compile(r"(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_QK = re.compile(r"self_attn\.[qk]_proj\.(weight|bias)$")


class GgufCheckpoint:
    """A `Checkpoint`. Raises ModelError naming the file and the key or tensor that cannot be used."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self._names = {_name(stored): stored for stored in self._file.tensors if stored != _ROPE_FACTORS}
        try:
            self._config = _config(self._file, self._names.keys())
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def config(self) -> ModelConfig:
        return self._config

    def names(self) -> Set[str]:
        return self._names.keys()

    def place(self, name: str) -> str:
        return f"tensor {self._names.get(name) or _stored(name)}"

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._names[name]].shape

    def read(self, name: str, target: Tensor) -> None:
        # llama.cpp's converter reorders the rows of q and k of this architecture only.
        interleaved = self._config.architecture == "llama" and _QK.search(name) is not None
        head = self._config.head_dim if interleaved else 1
        for first, values in self._file.chunks(self._names[name], row_multiple=head):
            target[first : first + len(values)] = _halves(values, head) if interleaved else values

    def files(self) -> Sequence[WeightFile]:
        tensors = [(tensor.start, tensor.size) for tensor in self._file.tensors.values()]
        return [WeightFile(self._file.bytes(), self._file.header_bytes, tensors)]

    def bundle(self) -> TokenizerBundle:
        try:
            return read_bundle(self._file.metadata)
        except ModelError as error:
            raise ModelError(f"{self.path}: {error}") from None


def _halves(values: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from the order (0, D/2, 1, D/2 + 1, ...) back to (0, 1, ..., D - 1).

    llama.cpp rotates neighbours, `transformers` and our kernel the two halves of a head; the converter's permutation
    (`LlamaModel.permute` of convert_hf_to_gguf.py) is undone here.
    """
    return values.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(values.shape)


def _name(stored: str) -> str:
    """The name in `transformers`; the stored one where there is none."""
    if match := _LAYER.fullmatch(stored):
        layer, part, kind = match.groups()
        if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    if (match := _TOP.fullmatch(stored)) and match[1] in _TOP_NAMES:
        return f"{_TOP_NAMES[match[1]]}.{match[2]}"
    return stored


def _stored(name: str) -> str:
    """The inverse of `_name`."""
    part, kind = name.rsplit(".", 1)
    for stored, known in _TOP_NAMES.items():
        if part == known:
            return f"{stored}.{kind}"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", part)
    for stored, known in _LAYER_NAMES.items():
        if match and match[2] == known:
            return f"blk.{match[1]}.{stored}.{kind}"
    return name


def _config(file: GgufFile, names: Set[str]) -> ModelConfig:
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(f"general.architecture {architecture!r} is not supported; known: {', '.join(ARCHITECTURES)}")
    keys = _Keys(metadata, architecture)
    keys.refuse("expert_count", "logit_scale", "embedding_scale", "residual_scale", "attention.scale")
    context = keys.whole("context_length")
    if 0 < (keys.get("attention.sliding_window") or 0) < context:
        keys.refuse("attention.sliding_window")
    heads = keys.whole("attention.head_count")
    hidden = keys.whole("embedding_length")
    head_dim = keys.get("attention.key_length") or hidden // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, head_dim) != head_dim:
            raise ModelError(f"{architecture}.{key} is {keys.get(key)}; only the head's {head_dim} dims are supported")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_rows(file, "token_embd.weight"),
        hidden_size=hidden,
        intermediate_size=keys.whole("feed_forward_length"),
        layers=keys.whole("block_count"),
        heads=heads,
        kv_heads=keys.whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=float(keys.required("attention.layer_norm_rms_epsilon")),
        rope=_rope(file, keys, head_dim),
        context_length=context,
        qkv_bias=architecture == "qwen2" or "model.layers.0.self_attn.q_proj.bias" in names,
        output_bias="model.layers.0.self_attn.o_proj.bias" in names,
        qk_norm=architecture == "qwen3",
        tied_head="lm_head.weight" not in names,
    )


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

    def refuse(self, *keys: str) -> None:
        for key in keys:
            if self.get(key):
                raise ModelError(f"metadata {self._prefix}.{key} = {self.get(key)!r} is not supported")


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
    if _ROPE_FACTORS in file.tensors:  # how the converter stores Llama 3's scaling
        shape = file.tensors[_ROPE_FACTORS].shape
        if shape != (head_dim // 2,):
            raise ModelError(f"tensor {_ROPE_FACTORS} has the shape {list(shape)}; expected [{head_dim // 2}]")
        divisors *= torch.cat([values for _, values in file.chunks(_ROPE_FACTORS)])
    return Rope(theta, () if bool((divisors == 1).all()) else tuple(divisors.tolist()))
