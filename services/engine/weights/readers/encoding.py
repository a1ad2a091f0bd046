"""A quantized matrix of a file, whatever its layout is."""

from typing import Protocol

from torch import Tensor

from kernels.linear.grouped.form import Grouped
from kernels.linear.quantized import Quantized
from services.engine.weights.readers.scheme import Scheme


class Encoding(Protocol):
    """The constructors check types and shapes, from the headers of the files; the methods check the values."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K], or [E, N, K] of a stack of experts, which the methods see as one matrix of E * N rows."""
        ...

    @property
    def format(self) -> str:
        """As `QuantizedSource.format`: what `encoded` gives, or the type to decode to where it cannot give any."""
        ...

    @property
    def scheme(self) -> Scheme:
        """As the tensors show it."""
        ...

    def encoded(self, first: int, last: int) -> Quantized | Grouped:
        """Rows [first, last), without loss. Raises ModelError."""
        ...

    def decoded(self, first: int, last: int) -> Tensor:
        """float32 [last - first, K]. Raises ModelError."""
        ...
