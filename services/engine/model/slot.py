"""Where the tensors of a checkpoint go."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Empty = Callable[..., Tensor]
"""`torch.empty` with the model's dtype and device."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one tensor of a checkpoint, named as `transformers` names it."""

    name: str
    target: Tensor
    """A view of the model's memory, to be filled with exactly this shape."""
