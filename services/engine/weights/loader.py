"""From the name of a model to a model that runs, its tokenizer and its fingerprint."""

import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch

from services.engine.config import EngineConfig, KvFormat
from services.engine.model.config import ModelError
from services.engine.model.dense import DenseDecoder
from services.engine.model.family import DecoderConfig, build_decoder
from services.engine.model.hybrid_config import HybridConfig
from services.engine.model.matrix import MatrixSlot, Place
from services.engine.model.mtp import MtpHead
from services.engine.model.qwen3_5 import HybridDecoder
from services.engine.weights.binding import bind
from services.engine.weights.checkpoint import Checkpoint
from services.engine.weights.fingerprint import fingerprint
from services.engine.weights.opening import open_model
from services.engine.weights.packed import pack_folder, packed_model
from services.engine.weights.resolve import resolve
from services.engine.weights.source import QuantizedSource
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
    when the device has no room. Host memory beyond the weights themselves is bounded (tensors are read in pieces)."""
    checkpoint, name = open_checkpoint(config, progress)
    return load_checkpoint(checkpoint, name, config, progress)


def open_checkpoint(config: EngineConfig, progress: Progress) -> tuple[QuantizedSource, str]:
    """The model's files, after a download or packing where they are needed, and its own name. Raises ModelError."""
    device = resolve_device(config)  # a wrong setting comes out before a download
    progress(0.0, "finding the model")
    if config.recipe:
        located = packed_model(config.model, config.recipe, pack_folder(config.pack_dir), device, progress)
    else:
        located = resolve(config.model)
    return open_model(located, device), located.name


def load_checkpoint(checkpoint: QuantizedSource, name: str, config: EngineConfig, progress: Progress) -> LoadedModel:
    """The same for a model that is found; `name`: its own."""
    device = resolve_device(config)
    dtype = resolve_dtype(config, device)
    packed = stays_packed(config, device)
    # Before the weights: what is wrong with it comes out soon.
    bundle = checkpoint.bundle()
    model, mtp, places = decoder_of(checkpoint, dtype, device, config.kv_format)
    with torch.inference_mode():
        bind(places, checkpoint, packed, device, lambda share, what: progress(0.95 * share, what))
    if isinstance(model, HybridDecoder):
        progress(0.95, "preparing kernels")
        with torch.inference_mode():
            model.prepare()
    progress(0.95, "fingerprint")
    model_fingerprint = fingerprint(checkpoint, dtype, config.kv_format, config.state_dtype)
    progress(1.0, "loaded")
    return LoadedModel(
        name=config.model_name or name,
        model=model,
        mtp=mtp,
        model_config=checkpoint.config,
        fingerprint=model_fingerprint,
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


def stays_packed(config: EngineConfig, device: torch.device) -> bool:
    """Whether quantized weights keep their codes in memory."""
    return config.weights == "packed" or (config.weights == "auto" and device.type == "cuda")


def decoder_of(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, kv_format: KvFormat = "auto"
) -> tuple[DenseDecoder | HybridDecoder, MtpHead | None, list[Place]]:
    """The decoder and its head for multi-token prediction, not filled yet, and the places that the checkpoint fills.
    Raises ModelError when it holds more."""
    model = build_decoder(checkpoint.config, dtype, device)
    mtp = _mtp_head(model, checkpoint, kv_format)
    return model, mtp, _wanted([*model.slots(), *(mtp.slots() if mtp is not None else ())], checkpoint)


def _mtp_head(model: DenseDecoder | HybridDecoder, checkpoint: Checkpoint, kv_format: KvFormat) -> MtpHead | None:
    """The config decides, and many files lack the tensors that it announces."""
    if not isinstance(model, HybridDecoder) or not model.config.mtp:
        return None
    if _MTP_FIRST not in checkpoint.names():
        log.info("%s: the config names a head for multi-token prediction, the weights hold none", checkpoint.path)
        return None
    return MtpHead(model, kv_format)


def _wanted(places: Sequence[Place], checkpoint: Checkpoint) -> list[Place]:
    """The same places under the names that the checkpoint has. Raises ModelError when it holds more."""
    names = checkpoint.names()
    wanted: list[Place] = []
    for place in places:
        if isinstance(place, MatrixSlot) and place.parts and place.name not in names:
            wanted += place.parts
        else:
            wanted.append(place)
    known = {place.name for place in wanted}
    if checkpoint.config.tied_head:
        known.add(_HEAD)  # some files hold it although it is tied
    # A tensor that nobody reads would be a wrong answer without an error.
    unknown = sorted(name for name in names - known if not _left_out(name, checkpoint.config, known))
    if unknown:
        raise ModelError(
            f"{checkpoint.path}: {checkpoint.place(unknown[0])} is not part of a {checkpoint.config.architecture} "
            f"decoder as supported here ({len(unknown)} such tensors)"
        )
    return wanted


def _left_out(name: str, config: DecoderConfig, known: Set[str]) -> bool:
    """A tensor of a head for multi-token prediction that is not loaded."""
    return isinstance(config, HybridConfig) and name.startswith("mtp.") and _MTP_FIRST not in known
