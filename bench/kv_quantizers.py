"""Four-bit quantizers with a scale for each 64 dims, at equal bytes: those of the formats, and published ones that were
weighed against them."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.distributions import StudentT

from kernels.kv_codec import kv_form, rotate
from kernels.kv_codec.e8 import E8Rows
from kernels.kv_codec.rows import RowCodec

_E8 = E8Rows(4, 64)
ROWS = 20_000
GROUP = 64
_MIDDLES = (0.25825, 0.52245, 0.7996, 1.0993, 1.43715, 1.84355, 2.4008)
_LEVELS = (6.0, 18.0, 31.0, 44.0, 58.0, 75.0, 96.0, 127.0)
"""Lloyd's and Max's 16 levels for Gaussian values, in 127ths of the outermost, and the borders in standard deviations:
as in the newer 4-bit K of the ninfer family."""


def squared_errors() -> Iterator[tuple[str, str, float]]:
    """(quantizer, rows, squared error over energy)."""
    torch.manual_seed(0)  # torch.distributions knows no generator
    heavy = StudentT(3.0).sample((ROWS, GROUP))
    heavy[:, :2] *= 10
    kinds = {"gaussian": torch.randn(ROWS, GROUP), "rotated-heavy": rotate(heavy)}
    quantizers: dict[str, Callable[[Tensor], Tensor]] = {
        "int4, peak / 7": _peak_over_7,
        "int4, Lloyd-Max": _lloyd_max,
        "int4 of rk4v4": partial(_through, kv_form("rk4v4", torch.float32).keys),
        "e8, then int4": _coset_lost,
        "e8 of rk4v4-e8": partial(_through, _E8),
    }
    for kind, rows in kinds.items():
        for name, quantizer in quantizers.items():
            error = (quantizer(rows) - rows).square().sum() / rows.square().sum()
            yield name, kind, error.item()


def _through(codec: RowCodec, rows: Tensor) -> Tensor:
    return codec.decode(*codec.encode(rows))


def _peak_over_7(rows: Tensor) -> Tensor:
    scale = (rows.abs().amax(-1, keepdim=True) / 7).half().float()
    return (rows / scale).round().clamp(-8, 7) * scale


def _lloyd_max(rows: Tensor) -> Tensor:
    spread = rows.square().mean(-1, keepdim=True).sqrt()
    values = torch.tensor(_LEVELS)[torch.bucketize(rows.abs() / spread, torch.tensor(_MIDDLES))] * rows.sign()
    scale = ((rows * values).sum(-1, keepdim=True) / values.square().sum(-1, keepdim=True)).half().float()
    return values * scale


def _coset_lost(rows: Tensor) -> Tensor:
    """Nearest points of E8 that are then stored as integers: those of the coset D8 + 1/2 are rounded."""
    scale = (rows.abs().amax(-1, keepdim=True) / 7).half()
    # The codec's points are those of E8 + 1/4.
    points, coset = _E8.nearest(rows[:, None] + scale.float()[:, None] / 4, scale)
    values = points.float() + coset.float()[..., None] / 2
    return values.round().clamp(-8, 7).flatten(-3) * scale.float()
