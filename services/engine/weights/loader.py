"""From the name of a model to a model that runs, its tokenizer and its fingerprint."""

import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch

from services.engine.config import EngineConfig
from services.engine.model.config import ModelError
from services.engine.model.dense import DenseDecoder
from services.engine.model.family import DecoderConfig, build_decoder
from services.engine.model.hybrid_config import HybridConfig
from services.engine.model.layers import Slot
from services.engine.model.mtp import MtpHead
from services.engine.model.qwen3_5 import HybridDecoder
from services.engine.weights.checkpoint import Checkpoint, fill
from services.engine.weights.fingerprint import fingerprint
from services.engine.weights.gguf_checkpoint import GgufCheckpoint
from services.engine.weights.resolve import resolve
from services.engine.weights.safetensors_checkpoint import SafetensorsCheckpoint
from services.protocol.events import TokenizerBundle

log = logging.getLogger(__name__)

Progress = Callable[[float, str], None]
"""Called with 0 to 1 and what is being done, on the loading thread."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HEAD = "lm_head.weight"
_MTP_FIRST = "mtp.fc.weight"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    name: str
    """What clients call it: the setting, or the file's or folder's own name."""
    model: DenseDecoder | HybridDecoder
    """On `model.device`, in `model.dtype`."""
    mtp: MtpHead | None
    """None where config or weights have none."""
    model_config: DecoderConfig
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
    model = build_decoder(checkpoint.config, dtype, device)
    mtp = _mtp_head(model, checkpoint)
    _fill([*model.slots(), *(mtp.slots() if mtp is not None else ())], checkpoint, progress)
    if isinstance(model, HybridDecoder):
        progress(0.95, "preparing kernels")
        with torch.inference_mode():
            model.prepare()
    progress(0.95, "fingerprint")
    name = fingerprint(checkpoint, dtype)
    progress(1.0, "loaded")
    return LoadedModel(
        name=config.model_name or located.name,
        model=model,
        mtp=mtp,
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


def _mtp_head(model: DenseDecoder | HybridDecoder, checkpoint: Checkpoint) -> MtpHead | None:
    """The config decides, and many files lack the tensors that it announces."""
    if not isinstance(model, HybridDecoder) or not model.config.mtp:
        return None
    if _MTP_FIRST not in checkpoint.names():
        log.info("%s: the config names a head for multi-token prediction, the weights hold none", checkpoint.path)
        return None
    return MtpHead(model)


def _fill(slots: Sequence[Slot], checkpoint: Checkpoint, progress: Progress) -> None:
    names = checkpoint.names()
    wanted: list[Slot] = []
    for slot in slots:
        wanted += slot.parts if slot.parts and slot.name not in names else (slot,)
    known = {slot.name for slot in wanted}
    if checkpoint.config.tied_head:
        known.add(_HEAD)  # some files hold it although it is tied
    # A tensor that nobody reads would be a wrong answer without an error.
    unknown = sorted(name for name in names - known if not _left_out(name, checkpoint.config, known))
    if unknown:
        raise ModelError(
            f"{checkpoint.path}: {checkpoint.place(unknown[0])} is not part of a {checkpoint.config.architecture} "
            f"decoder as supported here ({len(unknown)} such tensors)"
        )
    total = sum(slot.target.numel() for slot in wanted)
    filled = 0
    with torch.inference_mode():
        for slot in wanted:
            fill(checkpoint, slot.name, slot.target)
            filled += slot.target.numel()
            progress(0.95 * filled / total, slot.name)


def _left_out(name: str, config: DecoderConfig, known: Set[str]) -> bool:
    """A tensor of a head for multi-token prediction that is not loaded."""
    return isinstance(config, HybridConfig) and name.startswith("mtp.") and _MTP_FIRST not in known
