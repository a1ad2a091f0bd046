"""The stored tensors of one quantized matrix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from services.engine.model.config import ModelError
from services.engine.weights.safetensors_checkpoint import SafetensorsCheckpoint


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor as it lies in a file."""

    checkpoint: SafetensorsCheckpoint
    name: str

    @property
    def kind(self) -> str:
        """Type of its elements, as safetensors names it: `F8_E4M3`."""
        return self.checkpoint.kind(self.name)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.checkpoint.shape(self.name)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def whole(self) -> Tensor:
        return self.checkpoint.raw(self.name)

    def rows(self, first: int, last: int) -> Tensor:
        """[last - first, C]: of a matrix, or of a stack [E, R, C] seen as one of E * R rows. Only these are read."""
        if len(self.shape) == 2:
            return self.checkpoint.cut(self.name, slice(first, last))
        height = self.shape[1]
        pieces = []
        for at in range(first // height, -(-last // height)):
            inside = slice(max(0, first - at * height), min(height, last - at * height))
            pieces.append(self.checkpoint.cut(self.name, slice(at, at + 1), inside)[0])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def columns(self, first: int, last: int) -> Tensor:
        """[R, last - first] of a matrix; only these are read."""
        return self.checkpoint.cut(self.name, slice(None), slice(first, last))

    def expect(self, kinds: Sequence[str], *shapes: tuple[int, ...]) -> None:
        """Raises ModelError when the tensor is of none of the types, or of none of the shapes, if any are named."""
        if self.kind not in kinds:
            raise self.error(f"has the type {self.kind}; expected {' or '.join(kinds)}")
        if shapes and self.shape not in shapes:
            raise self.error(f"has the shape {list(self.shape)}; expected {' or '.join(str(list(s)) for s in shapes)}")

    def finite(self, values: Tensor) -> Tensor:
        """The given values of this tensor. Raises ModelError when one is a NaN or an infinity."""
        if not bool(values.float().isfinite().all()):
            raise self.error("holds values that are not finite; expected numbers")
        return values

    def error(self, message: str) -> ModelError:
        return ModelError(f"{self.checkpoint.path}: {self.checkpoint.place(self.name)} {message}")


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix, or a stack of experts' matrices, and the tensors that it is stored in."""

    name: str
    """Of the tensor that it decodes to."""
    module: str
    """Its name without `.weight`."""
    parts: Mapping[str, Part]
    """By role, which is the last piece of a tensor's name: `weight`, `weight_scale`."""

    def part(self, role: str) -> Part:
        """Raises ModelError when it is missing."""
        if role in self.parts:
            return self.parts[role]
        raise next(iter(self.parts.values())).error(f"needs a tensor {role} beside it, which is missing")
