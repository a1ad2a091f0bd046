"""Folders of the Qwen3.5 family as other tools leave them, with what their weights decode to."""

import copy
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.linear.grouped.form import Grouped
from kernels.linear.grouped.form import dequantize as dequantize_grouped
from kernels.linear.quantized import Quantized, dequantize
from services.engine.config import EngineConfig
from services.engine.weights.loader import load_model
from services.engine.weights.readers import open_folder
from services.engine.weights.source import DENSE, QuantizedSource
from tests.engine.hybrid_models import hybrid_oracle
from tests.engine.test_safetensors import save
from tests.engine.tiny_models import Bench, oracle_logits, random_ids, row

Encoded = tuple[dict[str, Tensor], Tensor]
"""The parts of a matrix by the last piece of their names (behind `_` for a stack of experts), and its values."""
Encode = Callable[[str, Tensor], Encoded | None]
"""By a tensor's name; None leaves it as it is."""
LINEAR = re.compile(r".*(\w_proj|in_proj_qkv|in_proj_z)\.weight")

_SHAPE: dict[str, Any] = {
    # That of models/samovar-tiny, with fewer layers and tokens: all columns are multiples of 16, 64 and 128.
    "vocab_size": 96,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_WIDTHS: dict[str, dict[str, Any]] = {
    "dense": {"intermediate_size": 640},
    "odd": {"intermediate_size": 144, "hidden_size": 144, "linear_num_value_heads": 6},  # partial blocks and groups
    "moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
    },
}


@cache
def tiny(shape: str) -> Any:
    """Not to be changed."""
    model = hybrid_oracle("moe" if shape == "moe" else "dense", **{**_SHAPE, **_WIDTHS[shape]})
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and not name.endswith("conv1d.weight"):
                weight.mul_(4 * weight.shape[-1] ** -0.5)  # else nothing but rounding is left behind a few layers
    return model


def write(
    folder: Path,
    shape: str,
    encode: Encode,
    quantization: Mapping[str, Any] | None,
    prefix: str = "model.",
    one_by_one: bool = False,
) -> dict[str, Tensor]:
    """The decoded tensors by their canonical names. `encode` sees those; `prefix` takes the place of `model.`, with
    `one_by_one` each expert has its own tensors."""
    model = tiny(shape)
    save(folder)  # for its tokenizer
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    stored: dict[str, Tensor] = {}
    decoded: dict[str, Tensor] = {}
    for name, weight in _separate(model.state_dict(), one_by_one).items():
        parts, values = encode(name, weight) or ({"weight": weight}, weight)
        decoded[name] = values
        own = name.removesuffix(".weight")
        for role, part in parts.items():
            full = name if role == "weight" else f"{own}.{role}" if own != name else f"{name}_{role}"
            stored[re.sub(r"^model\.", prefix, full)] = part.contiguous()
    save_file(stored, folder / "model.safetensors")
    return decoded


def _separate(weights: Mapping[str, Tensor], one_by_one: bool) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        stem, _, last = name.rpartition(".")
        if one_by_one and last == "gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                result |= {f"{stem}.{expert}.gate_proj.weight": gate, f"{stem}.{expert}.up_proj.weight": up}
        elif one_by_one and name.endswith("experts.down_proj"):
            result |= {f"{stem}.{expert}.down_proj.weight": down for expert, down in enumerate(tensor)}
        else:
            result[name] = tensor
    return result


def change(folder: Path, name: str, tensor: Tensor | None) -> None:
    """Replace a stored tensor, or take it away."""
    path = folder / "model.safetensors"
    stored = {own: part for own, part in load_file(path).items() if own != name}
    save_file(stored if tensor is None else {**stored, name: tensor}, path)


def check(folder: Path, expected: Mapping[str, Tensor], formats: Mapping[str, str]) -> QuantizedSource:
    """All tensors, read and encoded, in whole and in pieces, are what they decode to. `formats`: by pieces of names."""
    source = open_folder(folder)
    assert source.names() == expected.keys()
    for name, values in expected.items():
        assert source.shape(name) == values.shape
        target = torch.empty(values.shape)
        source.read(name, target)
        torch.testing.assert_close(
            target, values.float(), rtol=1e-6, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}"
        )
        form = source.format(name)
        assert form == next((form for part, form in formats.items() if part in name), "float32"), name
        if form not in DENSE:
            flat = target.flatten(0, -2)
            torch.testing.assert_close(values_of(source.encoded(name, 0, len(flat))), flat, rtol=1e-7, atol=0)
            # Inside of words and of larger blocks; pieces of blocks start at a multiple of 128.
            middle = 128 if form == "fp8-block" else len(flat) // 2 + 3
            if middle < len(flat):
                pieces = [values_of(source.encoded(name, *part)) for part in ((0, middle), (middle, len(flat)))]
                torch.testing.assert_close(torch.cat(pieces), flat, rtol=1e-7, atol=0)
    return source


def values_of(encoded: Quantized | Grouped) -> Tensor:
    return dequantize(encoded) if isinstance(encoded, Quantized) else dequantize_grouped(encoded)


def assert_serves(folder: Path, shape: str, expected: Mapping[str, Tensor]) -> None:
    """Through the loader, in float32, as `transformers` with the decoded weights."""
    model = copy.deepcopy(tiny(shape))
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            weight.copy_(expected[name] if name in expected else _joined(name, expected))
    loaded = load_model(EngineConfig(model=str(folder), device="cpu"), lambda share, what: None)
    ids = random_ids(40, seed=1, vocab=96)
    logits = Bench(loaded.model).run(row(ids, 0, 40, [1], state=3))
    wanted = oracle_logits(model, ids)[-1]
    torch.testing.assert_close(logits[0], wanted, atol=1e-4 * float(wanted.abs().max()), rtol=0)


def _joined(name: str, expected: Mapping[str, Tensor]) -> Tensor:
    stem, _, last = name.rpartition(".")
    halves = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    experts = range(sum(key.startswith(f"{stem}.") and key.endswith(f"{halves[0]}.weight") for key in expected))
    return torch.stack([torch.cat([expected[f"{stem}.{e}.{half}.weight"] for half in halves]) for e in experts])
