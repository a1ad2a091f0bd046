"""What a folder's configs say about quantization, whoever wrote them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.engine.model.config import ModelError
from services.engine.weights.readers.compressed_tensors_config import read_compressed_tensors
from services.engine.weights.readers.modelopt_config import read_modelopt
from services.engine.weights.readers.scheme import Declaration
from services.engine.weights.readers.uniform_config import read_auto_round, read_awq, read_fp8, read_gptq
from services.engine.weights.tokenizer import read_json

KEYS = ("quantization_config", "compression_config")
"""In config.json, at the root or beside the text model's settings; the second one in older files."""
_BESIDE = "hf_quant_config.json"
_METHODS = ("fp8", "compressed-tensors", "modelopt", "awq", "gptq", "auto-round")


def read_declaration(folder: Path, config: Mapping[str, Any]) -> Declaration | None:
    """`config`: the folder's config.json. None when it says nothing of quantization. Raises ModelError naming the file
    and the key that we cannot honour."""
    beside: Mapping[str, Any] = {}
    if (folder / _BESIDE).exists():
        beside = read_json(folder / _BESIDE).get("quantization") or {}
    source = "config.json"
    try:
        raw = _quantization(config)
        if raw is not None:
            return _read(raw, beside)
        source = _BESIDE
        return read_modelopt({}, beside) if beside.get("quant_algo") else None
    except ModelError as error:
        raise ModelError(f"{folder / source}: {error}") from None


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model with plain weights."""
    kept = {key: value for key, value in config.items() if key not in KEYS}
    if isinstance(text := kept.get("text_config"), Mapping):
        kept["text_config"] = {key: value for key, value in text.items() if key not in KEYS}
    return kept


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    nested = config.get("text_config")
    for source in (config, nested if isinstance(nested, Mapping) else {}):
        for key in KEYS:
            if source.get(key):
                if not isinstance(source[key], Mapping):
                    raise ModelError(f"{key} = {source[key]!r}; expected an object")
                return source[key]
    return None


def _read(raw: Mapping[str, Any], beside: Mapping[str, Any]) -> Declaration:
    method = str(raw.get("quant_method")).lower()
    if method == "fp8":
        return read_fp8(raw)
    if method == "compressed-tensors" or (raw.get("quant_method") is None and raw.get("config_groups")):
        return read_compressed_tensors(raw)
    if method.startswith("modelopt"):
        return read_modelopt(raw, beside)
    if method == "awq":
        return read_awq(raw)
    if method == "gptq":
        return read_gptq(raw)
    if method == "auto-round":
        return read_auto_round(raw)
    raise ModelError(
        f"quantization_config.quant_method = {raw.get('quant_method')!r} is not supported; supported: "
        f"{', '.join(_METHODS)}"
    )
