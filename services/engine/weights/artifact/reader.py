"""A model in a folder of ours."""

from collections.abc import Sequence, Set
from functools import cached_property
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from kernels.linear import weight
from kernels.linear.grouped import weight as grouped
from kernels.linear.grouped.form import Grouped
from kernels.linear.grouped.weight import GroupedWeight
from kernels.linear.quantized import Quantized
from kernels.linear.weight import Weight
from services.engine.model.config import ModelError
from services.engine.model.family import DecoderConfig
from services.engine.weights.artifact import manifest as manifests
from services.engine.weights.artifact.form import DTYPES, Form, Natural, decoded, pieces
from services.engine.weights.artifact.manifest import Group, Manifest, Part
from services.engine.weights.artifact.shard import ShardReader
from services.engine.weights.checkpoint import WeightFile
from services.protocol.events import TokenizerBundle

TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
_PIECE_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
"""By type of device."""


class ArtifactCheckpoint:
    """A `QuantizedSource` that also gives whole groups. Mapped: only what is asked for is read.

    Raises ModelError naming what is missing, truncated, damaged, newer or unknown. Checksums cover what is not looked
    at here: see `verify`."""

    def __init__(self, folder: Path, device: torch.device | None = None, manifest: Manifest | None = None) -> None:
        """`device`: where the results of `encoded` and `group` lie; none is the CPU. Codes go there joined, and are
        split there. `manifest`: of a folder that has no `samovar.json` yet."""
        manifest = manifest or manifests.read(folder)
        self._folder, self.manifest = folder, manifest
        self._device = device or torch.device("cpu")
        self._config = manifest.decoder_config()
        self._shards = [ShardReader(folder / shard.file, shard.size) for shard in manifest.shards]
        self._groups = {group.name: group for group in manifest.groups}
        self._places = {part.name: (group, part) for group in manifest.groups for part in group.parts}

    @property
    def path(self) -> Path:
        return self._folder

    @property
    def config(self) -> DecoderConfig:
        return self._config

    def names(self) -> Set[str]:
        return self._places.keys()

    def groups(self) -> Set[str]:
        """What the kernels read as one matrix each."""
        return self._groups.keys()

    def parts(self, group: str) -> Sequence[Part]:
        """Which tensors lie in which rows of a group."""
        return self._groups[group].parts

    def place(self, name: str) -> str:
        if name not in self._places:
            return f"tensor {name}"
        group, _ = self._places[name]
        return f"tensor {name} of {self.manifest.shards[group.shard].file}"

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name][1].shape

    def format(self, name: str) -> str:
        return self._places[name][0].format

    def read(self, name: str, target: Tensor) -> None:
        group, part = self._places[name]
        rows = target.view(part.rows, group.columns)
        for first, last in pieces(part.rows, group.columns, _PIECE_ELEMENTS[self._device.type]):
            natural = self.natural(name, first, last)
            rows[first:last] = natural if isinstance(natural, Tensor) else decoded(natural)

    def encoded(self, name: str, first: int, last: int) -> Quantized | Grouped:
        natural = self.natural(name, first, last)
        if isinstance(natural, Tensor):
            raise ModelError(f"{self._folder}: {self.place(name)} is not quantized")
        return natural

    def natural(self, name: str, first: int, last: int) -> Natural:
        """Rows [first, last) of a tensor in the form that it is stored in."""
        group, part = self._places[name]
        return self._rows(group, part.first + first, part.first + last)

    def group(self, name: str) -> Weight | GroupedWeight | Tensor:
        """A whole group in the form that the kernels read; a Tensor [rows, columns] where it is not quantized."""
        group = self._groups[name]
        if group.format in DTYPES:
            values = self._rows(group, 0, group.rows)
            assert isinstance(values, Tensor)
            return values
        packed = []
        for first, last in pieces(group.rows, group.columns, _PIECE_ELEMENTS[self._device.type]):
            natural = self._rows(group, first, last)
            assert not isinstance(natural, Tensor)
            packed.append(weight.pack(natural) if isinstance(natural, Quantized) else grouped.pack(natural))
        flat = [piece for piece in packed if isinstance(piece, Weight)]
        return weight.stack(flat) if flat else grouped.stack([p for p in packed if isinstance(p, GroupedWeight)])

    def release(self, group: str) -> None:
        """Its pages need no longer be in this process's memory. Nothing that was given out may be written to."""
        self._shards[self._groups[group].shard].release(group)

    def files(self) -> Sequence[WeightFile]:
        return [shard.weight_file() for shard in self._shards]

    @cached_property
    def _template(self) -> str:
        path = self._folder / TEMPLATE
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def bundle(self) -> TokenizerBundle:
        path = self._folder / TOKENIZER
        try:
            tokenizer = path.read_text(encoding="utf-8")
            msgspec.json.decode(tokenizer)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, msgspec.MsgspecError) as error:
            raise ModelError(f"{path} is damaged: {error}") from None
        return TokenizerBundle(
            tokenizer_json=tokenizer,
            chat_template=self._template,
            special=self.manifest.special,
            generation_defaults=self.manifest.generation_defaults,
        )

    def verify(self) -> None:
        """Read everything and compare the checksums. Raises ModelError naming the first file that differs."""
        for shard, reader in zip(self.manifest.shards, self._shards, strict=True):
            if reader.checksum() != shard.blake2b:
                raise ModelError(f"{reader.path} is damaged: its checksum differs; pack or download it again")

    def _rows(self, group: Group, first: int, last: int) -> Natural:
        form = Form(group.format, group.columns, group.layout)
        tensors = self._shards[group.shard].tensors(group.name)
        try:
            rows = form.rows(tensors, first, last)
            return form.natural({field: tensor.to(self._device) for field, tensor in rows.items()})
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ModelError(f"{self._folder}: group {group.name} is damaged: {error}") from error
