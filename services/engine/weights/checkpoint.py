"""What a model on disk offers to the loader, whatever its format is."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from services.engine.model.config import ModelError
from services.engine.model.family import DecoderConfig
from services.protocol.events import TokenizerBundle


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A mapped file, for the fingerprint."""

    data: memoryview
    header_bytes: int
    """At the start of the file: names, shapes and types of the tensors."""
    tensors: Sequence[tuple[int, int]]
    """(start, size) in bytes of each tensor's values."""


class Checkpoint(Protocol):
    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> DecoderConfig: ...

    def names(self) -> Set[str]:
        """All tensors that mean something to a decoder, by the names of `transformers` where they have one."""
        ...

    def place(self, name: str) -> str:
        """Where a tensor lies and what it is called there, for messages."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, target: Tensor) -> None:
        """Copy one of `names` into `target`, which has its shape, converting the values to its dtype.

        Takes bounded host memory. Raises ModelError when the values cannot be read."""
        ...

    def files(self) -> Sequence[WeightFile]:
        """In a stable order."""
        ...

    def bundle(self) -> TokenizerBundle:
        """Raises ModelError when the model has no tokenizer that we can serve."""
        ...


def expect(checkpoint: Checkpoint, name: str, shape: Sequence[int]) -> None:
    """Raises ModelError when tensor `name` is missing or has another shape."""
    if name not in checkpoint.names():
        raise ModelError(f"{checkpoint.path}: {checkpoint.place(name)} is missing; expected with shape {list(shape)}")
    found = checkpoint.shape(name)
    if found != tuple(shape):
        raise ModelError(
            f"{checkpoint.path}: {checkpoint.place(name)} has the shape {list(found)}; expected {list(shape)}"
        )


def fill(checkpoint: Checkpoint, name: str, target: Tensor) -> None:
    """Read tensor `name` into `target`. Raises ModelError when it is missing, has another shape, or holds a NaN or an
    infinity."""
    expect(checkpoint, name, target.shape)
    checkpoint.read(name, target)
    low, high = target.aminmax()  # NaN comes out as both
    if not (low.isfinite() and high.isfinite()):
        raise ModelError(
            f"{checkpoint.path}: {checkpoint.place(name)} holds values that are not finite in {target.dtype}; expected "
            "numbers"
        )
