"""From the name of a model to a model that runs, its tokenizer and its fingerprint."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.engine.config import EngineConfig
from services.engine.model.config import ModelConfig, ModelError
from services.engine.model.dense import DenseDecoder
from services.engine.weights.checkpoint import Checkpoint, fill
from services.engine.weights.fingerprint import fingerprint
from services.engine.weights.gguf_checkpoint import GgufCheckpoint
from services.engine.weights.resolve import resolve
from services.engine.weights.safetensors_checkpoint import SafetensorsCheckpoint
from services.protocol.events import TokenizerBundle

Progress = Callable[[float, str], None]
"""Called with 0 to 1 and what is being done, on the loading thread."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    name: str
    """What clients call it: the setting, or the file's or folder's own name."""
    model: DenseDecoder
    """On `model.device`, in `model.dtype`."""
    model_config: ModelConfig
    fingerprint: str
    bundle: TokenizerBundle
    context_length: int
    """The model's own limit; EngineConfig.max_model_len is not applied."""


def load_model(config: EngineConfig, progress: Progress) -> LoadedModel:
    """Raises ModelError when the model cannot be found, read or honoured, and torch.OutOfMemoryError or RuntimeError
    when the device has no room. Host memory beyond the weights themselves is bounded (GGUF is decoded in pieces)."""
    device = resolve_device(config)
    dtype = resolve_dtype(config, device)
    progress(0.0, "finding the model")
    located = resolve(config.model)
    checkpoint: Checkpoint = (
        GgufCheckpoint(located.path) if located.kind == "gguf" else SafetensorsCheckpoint(located.path)
    )
    # Before the weights: what is wrong with it comes out soon.
    bundle = checkpoint.bundle()
    model = DenseDecoder(checkpoint.config, dtype, device)
    _fill(model, checkpoint, progress)
    progress(0.95, "fingerprint")
    name = fingerprint(checkpoint, dtype)
    progress(1.0, "loaded")
    return LoadedModel(
        name=config.model_name or located.name,
        model=model,
        model_config=checkpoint.config,
        fingerprint=name,
        bundle=bundle,
        context_length=checkpoint.config.context_length,
    )


def resolve_device(config: EngineConfig) -> torch.device:
    """Raises ModelError when CUDA is asked for and not there."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ModelError("SAMOVAR_DEVICE=cuda, but torch finds no CUDA device here; cpu and auto work")
    return torch.device(config.device)


def resolve_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _DTYPES[config.dtype]


def _fill(model: DenseDecoder, checkpoint: Checkpoint, progress: Progress) -> None:
    slots = list(model.slots())
    known = {slot.name for slot in slots}
    if checkpoint.config.tied_head:
        known.add(_HEAD)  # some files hold it although it is tied
    # A tensor that nobody reads would be a wrong answer without an error.
    unknown = sorted(checkpoint.names() - known)
    if unknown:
        raise ModelError(
            f"{checkpoint.path}: {checkpoint.place(unknown[0])} is not part of a {checkpoint.config.architecture} "
            f"decoder as supported here ({len(unknown)} such tensors)"
        )
    total = sum(slot.target.numel() for slot in slots)
    filled = 0
    with torch.inference_mode():
        for slot in slots:
            fill(checkpoint, slot.name, slot.target)
            filled += slot.target.numel()
            progress(0.95 * filled / total, slot.name)
