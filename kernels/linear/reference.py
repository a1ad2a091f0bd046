"""Plain torch, any device: the oracle."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.linear.quantized import dequantize
from kernels.linear.weight import Weight, unpack


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def linear_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same as (W x^T)^T, with a second row where there is only one: MKL's product with a vector, and its product
    with a flat left side, read the weights at half of the memory's speed."""
    rows = len(x)
    wide = pad(x, (0, 0, 0, 1)) if rows == 1 else x
    out = (weight @ wide.t()).t()[:rows].contiguous()
    return out if bias is None else out + bias


def linear_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Of half precision, as it was summed: float32."""
    # On a CPU torch has no product of another dtype than its factors'.
    out = torch.mm(x, weight.t(), out_dtype=torch.float32) if x.is_cuda else x.float() @ weight.float().t()
    return out if bias is None else out + bias


def linear_packed(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """In float32, rounded once."""
    out = x.float() @ dequantize(unpack(weight)).t()
    return (out if bias is None else out + bias.float()).to(x.dtype)
