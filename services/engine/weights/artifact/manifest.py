"""`samovar.json`: what an artifact holds, and where it came from."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from kernels.linear.grouped.form import Layout
from kernels.linear.quantized import FORMATS
from services.engine.model.config import ModelConfig, ModelError
from services.engine.model.family import DecoderConfig
from services.engine.model.hybrid_config import HybridConfig
from services.engine.weights.source import DENSE, GROUPED
from services.protocol.events import SpecialTokens

FILE = "samovar.json"
VERSION = 1
"""Of the folder's layout. Readers refuse a newer one."""


class Part(Struct, frozen=True):
    """A tensor of a checkpoint: some rows of a group."""

    name: str
    shape: tuple[int, ...]
    first: int
    """Row of the group."""

    @property
    def rows(self) -> int:
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows


class Group(Struct, frozen=True):
    """What the kernels read as one matrix; a lone vector counts as a row. Its tensors are called `NAME.FIELD` in the
    shard, see `form.stored`."""

    name: str
    format: str
    rows: int
    columns: int
    shard: int
    parts: tuple[Part, ...]
    nbytes: int = 0
    squares: tuple[float, float] | None = None
    """Sums over (written - source)^2 and source^2; None: codes, scales and values are the source's."""
    layout: Layout | None = None
    """Of the format `grouped`."""


class Shard(Struct, frozen=True):
    file: str
    size: int
    blake2b: str


class Provenance(Struct, frozen=True):
    source: str
    """As the user named it."""
    source_hash: str
    recipe: str
    recipe_digest: str
    tool: str
    date: str


class Manifest(Struct, frozen=True):
    architecture: str
    family: str
    """`dense` or `hybrid`: of which type `config` is."""
    config: dict[str, Any]
    special: SpecialTokens
    generation_defaults: dict[str, float]
    groups: tuple[Group, ...]
    shards: tuple[Shard, ...]
    fingerprint: str
    """Of config and weights: equal for equal content, whenever and from wherever it was packed."""
    provenance: Provenance
    version: int = VERSION

    def decoder_config(self) -> DecoderConfig:
        """Raises ModelError."""
        kinds: Mapping[str, type[DecoderConfig]] = {"dense": ModelConfig, "hybrid": HybridConfig}
        if self.family not in kinds:
            raise ModelError(f"family {self.family!r} is unknown; known: {', '.join(kinds)}")
        try:
            return msgspec.convert(self.config, kinds[self.family])
        except msgspec.ValidationError as error:
            raise ModelError(f"config: {error}") from None


class _Version(Struct):
    version: int


def describe(config: DecoderConfig) -> tuple[str, dict[str, Any]]:
    """`Manifest.family` and `Manifest.config`."""
    return ("hybrid" if isinstance(config, HybridConfig) else "dense"), msgspec.to_builtins(config)


def fingerprint(config: Mapping[str, Any], groups: tuple[Group, ...], shards: tuple[Shard, ...]) -> str:
    """32 hex digits. The shards' hashes cover all values, names and shapes."""
    digest = hashlib.blake2b(digest_size=16, person=b"samovar-pack")
    content = (config, [(group.name, group.format, group.layout, group.parts) for group in groups], shards)
    digest.update(msgspec.json.encode(content, order="sorted"))
    return digest.hexdigest()


def read(folder: Path) -> Manifest:
    """Raises ModelError naming what is missing, broken, newer or unknown."""
    path = folder / FILE
    try:
        content = path.read_bytes()
        version = msgspec.json.decode(content, type=_Version).version
        if version > VERSION:
            raise ModelError(
                f"{path} is of version {version}; this Samovar reads up to version {VERSION}: update Samovar, "
                "or pack the model again"
            )
        manifest = msgspec.json.decode(content, type=Manifest)
        manifest.decoder_config()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path} is damaged: {error}") from None
    for group in manifest.groups:
        known = (*FORMATS, GROUPED, *DENSE)
        if group.format not in known:
            raise ModelError(f"{path}: {group.name} has the format {group.format!r}; known: {', '.join(known)}")
        if (group.layout is not None) != (group.format == GROUPED) or group.shard >= len(manifest.shards):
            raise ModelError(f"{path} is damaged: {group.name} has no layout or no shard")
    return manifest


def write(folder: Path, manifest: Manifest) -> None:
    """All at once: a reader finds the old one, none, or the new one."""
    path = folder / FILE
    new = folder / f"{FILE}.new"
    with new.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
