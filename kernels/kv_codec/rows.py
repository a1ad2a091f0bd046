"""How one row (K or V of a token and head) is stored: the interface, and rows as they are."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class RowCodec(Protocol):
    """A row of D dims becomes `code_count(D)` codes and `scale_count(D)` scales.

    All of it is zero in a page that nobody wrote to, and zeros must decode to zeros. Encoding and decoding are float32
    arithmetic in a stated order, so that a kernel on another device gives the same codes; but where E8 compares sums of
    8 or 64 squares, their order is open and decides between points that are equally near up to rounding.
    """

    @property
    def multiple(self) -> int:
        """D must be a multiple of it."""
        ...

    @property
    def code_dtype(self) -> torch.dtype: ...

    @property
    def scale_dtype(self) -> torch.dtype: ...

    def code_count(self, dim: int) -> int: ...

    def scale_count(self, dim: int) -> int: ...

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows [..., D] of any float dtype -> codes [..., code_count] and scales [..., scale_count]. A group of dims
        with a value that is not finite decodes to values that are not finite either, in every codec with scales: what
        has overflowed must not come back as something plausible. So does one whose scale overflows float16."""
        ...

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The inverse shapes; [..., D], float32 (plain rows: their own dtype)."""
        ...


@dataclass(frozen=True, slots=True)
class PlainRows:
    """The values themselves."""

    dtype: torch.dtype

    @property
    def multiple(self) -> int:
        return 1

    @property
    def code_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.uint8

    def code_count(self, dim: int) -> int:
        return dim

    def scale_count(self, dim: int) -> int:
        return 0

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows.to(self.dtype), torch.empty((*rows.shape[:-1], 0), dtype=torch.uint8, device=rows.device)

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        return codes


def scaled(groups: Tensor, scales: Tensor) -> Tensor:
    """groups float32 [..., n, size] times the reciprocals of their scales [..., n], rounded in this order: float32 of
    the scale as it is stored, its reciprocal, the product. 0 in groups whose scale is 0 or not finite."""
    wide = scales.float()
    inverse = torch.where((wide != 0) & wide.isfinite(), 1.0 / wide, 0.0)
    return (groups * inverse[..., None]).nan_to_num(0.0)
