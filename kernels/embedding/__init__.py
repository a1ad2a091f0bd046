"""Rows of a matrix by their numbers: the vectors of tokens, the matrices of experts."""

import torch
from torch import Tensor
from torch.nn.functional import embedding

from kernels.embedding import reference
from kernels.linear.grouped.weight import GroupedWeight
from kernels.linear.weight import Weight


def embed(rows: Tensor, weight: Tensor | Weight | GroupedWeight, dtype: torch.dtype) -> Tensor:
    """rows int64 of any shape, each in [0, weight's rows). Returns [*rows.shape, columns] of `dtype`; only the rows
    that are asked for are decoded. A new tensor."""
    if isinstance(weight, Tensor):
        return embedding(rows, weight).to(dtype)
    if isinstance(weight, Weight) and weight.codes.is_cuda:
        from kernels.embedding.take import take  # triton exists on Linux only

        return take(rows.flatten(), weight, dtype).unflatten(0, rows.shape)
    return reference.decoded_rows(rows.flatten(), weight).to(dtype).unflatten(0, rows.shape)
