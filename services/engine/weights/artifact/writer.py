"""Writes an artifact: tensor by tensor, resumable, and read again before it counts as written."""

import hashlib
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import torch

from services.engine.model.config import ModelError
from services.engine.weights.artifact import manifest as manifests
from services.engine.weights.artifact.form import Field, Natural, stored, tensors
from services.engine.weights.artifact.journal import FILE as JOURNAL
from services.engine.weights.artifact.journal import Done, Journal
from services.engine.weights.artifact.manifest import Manifest, Provenance, Shard
from services.engine.weights.artifact.plan import SHARD_BYTES, Plan, PlannedGroup, plan
from services.engine.weights.artifact.reader import TEMPLATE, TOKENIZER, ArtifactCheckpoint
from services.engine.weights.artifact.shard import ShardWriter, checksum
from services.engine.weights.recipes import Recipe
from services.engine.weights.source import QuantizedSource
from services.protocol.events import SpecialTokens

Progress = Callable[[float, str], None]
"""Called with 0 to 1 and what is being done, after each piece."""

_COPIED = ("config.json", "generation_config.json", "tokenizer_config.json")
"""From a folder; for people, the reader does not need them."""
_CONVERTED, _READ_AGAIN = 0.85, 0.97
"""Of the progress."""


@dataclass(frozen=True, slots=True)
class Job:
    source: QuantizedSource
    name: str
    """Of the source, as the user wrote it."""
    source_hash: str
    recipe: Recipe
    recipe_name: str
    out: Path
    """A folder that is empty, missing, or left by the same job."""
    device: torch.device
    """That encodes."""
    shard_bytes: int = SHARD_BYTES

    def run(self, progress: Progress) -> Manifest:
        """Returns what was written. Whatever ends it half-way, the same job goes on behind the last whole group.

        Host memory: a piece of rows and the source's largest tensor that is not quantized, as stored; files are mapped.
        Raises ModelError, also when `out` is another model's or the disk is full."""
        with torch.inference_mode():
            return self._run(progress)

    def _run(self, progress: Progress) -> Manifest:
        planned = plan(self.source, self.recipe, self.shard_bytes)
        bundle = self.source.bundle()
        run = f"{self.source_hash} {self.recipe.digest()} {planned.digest()}"
        self._prepare()
        with closing(Journal(self.out, run)) as journal:
            if (self.out / manifests.FILE).exists():  # another process has just finished
                raise ModelError(f"{self.out} holds a packed model already: remove it, or choose another folder")
            self._convert(planned, journal, progress)
            manifest = self._read_again(planned, journal, progress)
            (self.out / TOKENIZER).write_text(bundle.tokenizer_json, encoding="utf-8")
            if bundle.chat_template:
                (self.out / TEMPLATE).write_text(bundle.chat_template, encoding="utf-8")
            for name in _COPIED:
                if (self.source.path / name).is_file():
                    shutil.copyfile(self.source.path / name, self.out / name)
            manifest = msgspec.structs.replace(
                manifest, special=bundle.special, generation_defaults=bundle.generation_defaults
            )
            manifests.write(self.out, manifest)
            journal.forget()
        progress(1.0, "packed")
        return manifest

    def _prepare(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelError(f"{self.out} cannot be made: {error.strerror}") from None
        found = {path.name for path in self.out.iterdir()}
        if manifests.FILE in found:
            raise ModelError(f"{self.out} holds a packed model already: remove it, or choose another folder")
        if found and JOURNAL not in found:
            raise ModelError(f"{self.out} is not empty: choose another folder")

    def _convert(self, planned: Plan, journal: Journal, progress: Progress) -> None:
        try:
            shards = [
                ShardWriter(self.out / _file(index, planned.shards), _fields(planned, index))
                for index in range(planned.shards)
            ]
        except OSError as error:
            raise ModelError(f"{self.out} has no room for the packed model: {error.strerror}") from None
        written = 0
        for group in planned.groups:
            if group.group.name in journal.done:
                written += group.elements
                continue
            shard = shards[group.group.shard]
            before = written
            written += group.elements

            def told(count: int, what: str, before: int = before) -> None:
                progress(_CONVERTED * (before + count) / planned.elements, what)

            journal.add(self._write(group, shard, told))
        for shard in shards:
            shard.sync()

    def _write(self, planned: PlannedGroup, shard: ShardWriter, told: Callable[[int, str], None]) -> Done:
        group = planned.group
        digest = hashlib.blake2b(digest_size=16)
        error, size, count = 0.0, 0.0, 0
        fields = {name.removeprefix(f"{group.name}."): shard.tensors[name] for name in planned.fields}
        for part, conversion in zip(group.parts, planned.conversions, strict=True):
            for piece in conversion.pieces(self.device):
                _hash(piece.natural, digest)
                places = planned.form.rows(fields, part.first + piece.first, part.first + piece.last)
                for field, values in stored(piece.natural).items():
                    places[field].copy_(values)
                    shard.release(f"{group.name}.{field}")
                error, size = error + piece.squares[0], size + piece.squares[1]
                count += (piece.last - piece.first) * group.columns
                told(count, part.name)
        changed = any(not conversion.keeps for conversion in planned.conversions)
        return Done(group.name, digest.hexdigest(), (error, size), changed)

    def _read_again(self, planned: Plan, journal: Journal, progress: Progress) -> Manifest:
        """Compares codes and scales with what was meant. Raises ModelError."""
        manifest = self._manifest(planned, journal)
        checkpoint = ArtifactCheckpoint(self.out, self.device, manifest)
        read = 0
        for group in planned.groups:
            digest = hashlib.blake2b(digest_size=16)
            for part, conversion in zip(group.group.parts, group.conversions, strict=True):
                for first, last in conversion.ranges(self.device):
                    _hash(checkpoint.natural(part.name, first, last), digest)
            checkpoint.release(group.group.name)
            if digest.hexdigest() != journal.done[group.group.name].digest:
                journal.forget()
                raise ModelError(
                    f"{self.out}: {group.group.name} does not read back as it was written: is the disk well?"
                )
            read += group.elements
            progress(_CONVERTED + (_READ_AGAIN - _CONVERTED) * read / planned.elements, f"reading {group.group.name}")
        shards = []
        for index, shard in enumerate(manifest.shards, 1):
            shards.append(msgspec.structs.replace(shard, blake2b=checksum(self.out / shard.file)))
            progress(_READ_AGAIN + (1 - _READ_AGAIN) * index / len(manifest.shards), f"checksum of {shard.file}")
        name = manifests.fingerprint(manifest.config, manifest.groups, tuple(shards))
        return msgspec.structs.replace(manifest, shards=tuple(shards), fingerprint=name)

    def _manifest(self, planned: Plan, journal: Journal) -> Manifest:
        """Without checksums, fingerprint and text."""
        config = self.source.config
        family, content = manifests.describe(config)
        groups = []
        for group in planned.groups:
            done = journal.done[group.group.name]
            groups.append(msgspec.structs.replace(group.group, squares=done.squares if done.changed else None))
        files = [_file(index, planned.shards) for index in range(planned.shards)]
        return Manifest(
            architecture=config.architecture,
            family=family,
            config=content,
            special=SpecialTokens(),
            generation_defaults={},
            groups=tuple(groups),
            shards=tuple(Shard(file, (self.out / file).stat().st_size, "") for file in files),
            fingerprint="",
            provenance=Provenance(
                source=self.name,
                source_hash=self.source_hash,
                recipe=self.recipe_name,
                recipe_digest=self.recipe.digest(),
                tool=f"samovar {_release()}",
                date=datetime.now(UTC).isoformat(timespec="seconds"),
            ),
        )


def _file(index: int, count: int) -> str:
    return f"model-{index + 1:05}-of-{count:05}.safetensors"


def _fields(planned: Plan, shard: int) -> dict[str, Field]:
    return {
        name: field for group in planned.groups if group.group.shard == shard for name, field in group.fields.items()
    }


def _hash(natural: Natural, digest: hashlib.blake2b) -> None:
    for tensor in tensors(natural):
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)


def _release() -> str:
    try:
        return version("samovar")
    except PackageNotFoundError:
        return "from source"
