"""A checkpoint of the 27B's shape with random weights in FP8, that only says words.

The tokenizer is the small model's. A judge counts pieces of text and times the first of them, so each token must be
text: the head's rows are 0 for all that is no word with a space before it, and the greatest of the others is above 0.
Such words are found again when an answer comes back as history, token for token.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench import random_checkpoint
from bench.judges.scales import SMALL_MODEL
from bench.random_checkpoint import TEXT

_MATRIX = re.compile(r"\.(mlp\.\w+|self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj))\.weight$")
SHARES = 4
"""Processes that write."""
_SPREAD = 0.02
"""Standard deviation of the weights."""
_CODES = 64.0
"""The same of the codes: E4M3 goes to 448."""
_WORD = re.compile(r"\u0120[a-z]+")
"""As byte-level vocabularies write one with a space before it."""
QUANTIZED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
        }
    },
    "ignore": ["lm_head", "re:.*in_proj_[ab]$"],
}


def write(folder: Path, layers: int, device: str) -> None:
    """A file a layer, by several processes: one alone waits for the bus most of its time, and a process takes its
    memory of the GPU with it. `config.json` comes last, which makes the folder a model. Raises CalledProcessError."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "bench.judges.checkpoint", str(folder), str(layers), device]
    writers = [subprocess.Popen([*command, str(share)]) for share in range(SHARES)]
    codes = [writer.wait() for writer in writers]
    if any(codes):
        raise subprocess.CalledProcessError(max(codes), command)
    random_checkpoint.write_text_side(folder, layers, {"quantization_config": QUANTIZED})


def write_share(folder: Path, layers: int, device: torch.device, share: int) -> None:
    """Of SHARES; the first one has embedding and head too."""
    generator = torch.Generator(device).manual_seed(share)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).mul_(_SPREAD)

    for layer in range(share, layers, SHARES):
        tensors = dict(_encoded(random_checkpoint.layer_tensors(layer, normal)))
        _save(folder, tensors, f"model-{layer:05}.safetensors")
    if share:
        return
    head = torch.zeros(TEXT["vocab_size"], TEXT["hidden_size"], dtype=torch.bfloat16, device=device)
    words = torch.tensor(word_ids(), device=device)
    head[words] = normal(len(words), TEXT["hidden_size"])
    ends = {
        "model.embed_tokens.weight": normal(TEXT["vocab_size"], TEXT["hidden_size"]),
        "model.norm.weight": torch.zeros(TEXT["hidden_size"], dtype=torch.bfloat16),
        "lm_head.weight": head,
    }
    _save(folder, ends, f"model-{layers:05}.safetensors")


def word_ids() -> list[int]:
    """Ids of the small model's tokens that are a space and a lowercase word."""
    vocabulary = json.loads((SMALL_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(token for text, token in vocabulary.items() if _WORD.fullmatch(text))


def _encoded(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Matrices of a layer as E4M3 codes with a scale for each row; all else as it is."""
    for name, tensor in tensors:
        if not _MATRIX.search(name):
            yield name, tensor
            continue
        yield name, tensor.mul_(_CODES / _SPREAD).to(torch.float8_e4m3fn)
        yield f"{name}_scale", torch.full((len(tensor), 1), _SPREAD / _CODES)


def _save(folder: Path, tensors: dict[str, Tensor], name: str) -> None:
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, folder / name)


if __name__ == "__main__":
    write_share(Path(sys.argv[1]), int(sys.argv[2]), torch.device(sys.argv[3]), int(sys.argv[4]))
