"""Plain torch, any device: the oracle."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def linear_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same as (W x^T)^T, with a second row where there is only one: MKL's product with a vector, and its product
    with a flat left side, read the weights at half of the memory's speed."""
    rows = len(x)
    wide = pad(x, (0, 0, 0, 1)) if rows == 1 else x
    out = (weight @ wide.t()).t()[:rows].contiguous()
    return out if bias is None else out + bias
