"""A checkpoint of the 27B's shape with random weights, as a Hugging Face folder in bfloat16: something to quantize and
to serve where the real one is not at hand. Any number of layers; one layer is in memory at a time."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

MODELS = Path(__file__).resolve().parent.parent / "models"
TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "full_attention_interval": 4,
    "mtp_num_hidden_layers": 0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
_SPREAD = 0.02
"""Standard deviation of the weights."""
_UNSAID = 0.01
"""By which the head's rows are multiplied whose tokens no answer shall hold."""


def write(
    folder: Path,
    layers: int,
    device: torch.device,
    seed: int = 0,
    text: Mapping[str, Any] = TEXT,
    words: Sequence[int] | None = None,
) -> int:
    """A shard a layer, and one for embedding and head; the tokenizer is the small model's. `text`: the config, TEXT's
    but for sizes; `words`: tokens of which all answers consist, the head's other rows are next to nothing. Returns
    bytes of weights."""
    folder.mkdir(parents=True)
    write_text_side(folder, layers, {}, text)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return values.mul_(_SPREAD).cpu()

    total = sum(
        _save(folder, dict(layer_tensors(layer, normal, text)), f"model-{layer:05}.safetensors")
        for layer in range(layers)
    )
    embedding, head = (normal(text["vocab_size"], text["hidden_size"]) for _ in range(2))
    if words is not None:
        kept = head[list(words)]
        head.mul_(_UNSAID)[list(words)] = kept
    ends = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.zeros(text["hidden_size"], dtype=torch.bfloat16),
        "lm_head.weight": head,
    }
    return total + _save(folder, ends, f"model-{layers:05}.safetensors")


def write_text_side(folder: Path, layers: int, extra: Mapping[str, Any], text: Mapping[str, Any] = TEXT) -> None:
    """The small model's tokenizer, and a config.json of `text` with `extra` in it."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(MODELS / "samovar-tiny" / name, folder / name)
    layer_types = [_kind(layer) for layer in range(layers)]
    config = {**text, "num_hidden_layers": layers, "layer_types": layer_types, **extra}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _kind(layer: int) -> str:
    return "full_attention" if (layer + 1) % TEXT["full_attention_interval"] == 0 else "linear_attention"


def layer_tensors(
    layer: int, normal: Callable[..., Tensor], text: Mapping[str, Any] = TEXT
) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of a layer. `normal`: random values around 0, by shape."""
    own = f"model.layers.{layer}"
    hidden, width = text["hidden_size"], text["intermediate_size"]
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{own}.{norm}.weight", torch.zeros(hidden, dtype=torch.bfloat16)
    yield f"{own}.mlp.gate_proj.weight", normal(width, hidden)
    yield f"{own}.mlp.up_proj.weight", normal(width, hidden)
    yield f"{own}.mlp.down_proj.weight", normal(hidden, width)
    if _kind(layer) == "full_attention":
        dim, heads, kv_heads = text["head_dim"], text["num_attention_heads"], text["num_key_value_heads"]
        yield f"{own}.self_attn.q_proj.weight", normal(2 * heads * dim, hidden)
        yield f"{own}.self_attn.k_proj.weight", normal(kv_heads * dim, hidden)
        yield f"{own}.self_attn.v_proj.weight", normal(kv_heads * dim, hidden)
        yield f"{own}.self_attn.o_proj.weight", normal(hidden, heads * dim)
        for norm in ("q_norm", "k_norm"):
            yield f"{own}.self_attn.{norm}.weight", torch.zeros(dim, dtype=torch.bfloat16)
        return
    values = text["linear_num_value_heads"]
    width = values * text["linear_value_head_dim"]
    channels = width + 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"]
    yield f"{own}.linear_attn.in_proj_qkv.weight", normal(channels, hidden)
    yield f"{own}.linear_attn.in_proj_z.weight", normal(width, hidden)
    yield f"{own}.linear_attn.in_proj_b.weight", normal(values, hidden)
    yield f"{own}.linear_attn.in_proj_a.weight", normal(values, hidden)
    yield f"{own}.linear_attn.conv1d.weight", normal(channels, 1, text["linear_conv_kernel_dim"])
    yield f"{own}.linear_attn.A_log", torch.zeros(values, dtype=torch.bfloat16)
    yield f"{own}.linear_attn.dt_bias", torch.ones(values, dtype=torch.bfloat16)
    yield f"{own}.linear_attn.norm.weight", torch.ones(text["linear_value_head_dim"], dtype=torch.bfloat16)
    yield f"{own}.linear_attn.out_proj.weight", normal(hidden, width)


def _save(folder: Path, tensors: dict[str, Tensor], name: str) -> int:
    save_file(tensors, folder / name)
    return sum(tensor.nbytes for tensor in tensors.values())
