"""Signed integers with a scale a group of columns.

A scale is tried for each of a few codes that the group's value of the largest magnitude may become; of -4..3, say, 3
or -3, then -4 (with a negative scale where that value is positive), then codes beyond the range: the value is cut off,
and all others are finer. The scale of least squared error is taken.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.linear.quantized import FORMATS, Quantized
from services.engine.weights.codecs.scale import inverse

_CUTS = {
    8: (),
    6: (1.04,),
    5: (1.05, 1.1, 1.15),
    4: (1.0625, 1.125, 1.1875, 1.25, 1.34),
    3: (1.0625, 1.125, 1.1875, 1.25, 1.3125, 1.4, 1.5, 1.65, 1.85, 2.1),
}
"""By bits: the largest magnitude as a multiple of the most negative code."""


def encode(values: Tensor, format: str, scale_dtype: torch.dtype) -> Quantized:
    form = FORMATS[format]
    columns = values.shape[1]
    bottom = -(2 ** (form.bits - 1))
    groups = pad(values, (0, -columns % form.group)).unflatten(1, (-1, form.group))
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    best, least = torch.empty(0), torch.empty(0)
    work = torch.empty_like(groups)
    # The first one is positive: else codes within -3..3 could come back with the other sign.
    trials = (extreme.abs() / (-bottom - 1), *(extreme / (bottom * cut) for cut in (1.0, *_CUTS[form.bits])))
    for trial in trials:
        scale = trial.to(scale_dtype)
        wide = scale.float()
        _codes(groups, wide, bottom, work).mul_(wide).sub_(groups)
        error = work.square_().sum(2, keepdim=True)
        if not best.numel():
            best, least = scale, error
        else:
            better = error < least
            best, least = torch.where(better, scale, best), torch.where(better, error, least)
    if not best.isfinite().all():
        raise ValueError(f"values up to {float(extreme.abs().max()):g} are too large for scales in {scale_dtype}")
    codes = _codes(groups, best.float(), bottom, work).to(torch.int8)
    return Quantized(format, codes.flatten(1)[:, :columns].contiguous(), best.squeeze(2))


def _codes(groups: Tensor, scale: Tensor, bottom: int, out: Tensor) -> Tensor:
    return torch.mul(groups, inverse(scale), out=out).round_().clamp_(bottom, -bottom - 1)
