"""Codes of 1 to 8 bits without gaps."""

import torch
from torch import Tensor
from torch.nn.functional import pad

_EIGHT = 8


def join(codes: Tensor, bits: int) -> Tensor:
    """uint8 [N, K], values below 2^bits -> uint8 [N, ceil(K / 8) * bits]: code i of a row lies in its bits i * bits and
    following, counted from the lowest bit of its first byte."""
    if bits == _EIGHT:
        return codes
    eights = pad(codes, (0, -codes.shape[1] % _EIGHT)).unflatten(1, (-1, _EIGHT))
    words = eights[..., 0].long()
    for place in range(1, _EIGHT):
        words |= eights[..., place].long() << (place * bits)
    return words[..., None].view(torch.uint8)[..., :bits].flatten(1)


def split(joined: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse, uint8 [N, columns]."""
    if bits == _EIGHT:
        return joined
    words = pad(joined.unflatten(1, (-1, bits)), (0, _EIGHT - bits)).view(torch.int64)[..., 0]
    codes = torch.empty((*words.shape, _EIGHT), dtype=torch.uint8, device=joined.device)
    mask = 2**bits - 1
    for place in range(_EIGHT):
        codes[..., place] = (words >> (place * bits)) & mask
    return codes.flatten(1)[:, :columns].contiguous()
