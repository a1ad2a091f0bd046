"""How a matrix is quantized, as far as a config and the stored tensors both say it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

_PREFIXES = {
    "model.": ("model.language_model.", "language_model.model."),
    "mtp.": ("model.mtp.",),
    "": ("language_model.",),
}
"""How others begin the names that text-only files begin with the key."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """What is None is not known, and fits anything."""

    kind: Literal["int", "float"]
    bits: int | None = None
    """Of a code."""
    group: int | None = None
    """Columns that share a scale."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale."""
    symmetric: bool | None = None
    """Integers without zero points."""

    def fits(self, other: "Scheme") -> bool:
        """Whether both may describe the same matrix."""
        pairs = ((self.bits, other.bits), (self.group, other.group), (self.block, other.block))
        return self.kind == other.kind and all(a is None or b is None or a == b for a, b in pairs)

    def __str__(self) -> str:
        parts = [f"{'' if self.bits is None else self.bits}-bit {self.kind}".lstrip("-")]
        if self.group is not None:
            parts.append(f"groups of {self.group}")
        if self.block is not None:
            parts.append(f"blocks of {self.block[0]} x {self.block[1]}")
        return " in ".join(parts)


class Declaration(Protocol):
    """What a model's config says about its quantization."""

    @property
    def method(self) -> str: ...

    @property
    def zeros_less_one(self) -> bool:
        """GPTQ's first format: zero points are stored with 1 subtracted."""
        ...

    def schemes(self, module: str) -> Sequence[Scheme]:
        """All that may apply to a module of a text-only file's name, the most specific one first; none where the
        config leaves it as it is."""
        ...


def aliases(module: str) -> list[str]:
    """The names that a module may have in a config, its own first."""
    names = [module]
    for short, others in _PREFIXES.items():
        if module.startswith(short):
            names += [other + module.removeprefix(short) for other in others]
    return names
