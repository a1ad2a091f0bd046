"""Where the bits of codes lie in 32-bit words.

A block of 128 columns of one row is seen as 8 runs of 16 columns: column 16 i + w is place i of lane w. Its codes take
4 * bits words, in planes of 4, 2 or 1 bits: low bits in the first plane. In a plane of b bits a word holds the codes of
4 / b neighbouring lanes, all 8 places of one lane together, lowest place in the lowest bits:

    word = w // (4 / b), bits from b * (8 * (w % (4 / b)) + i) on

So a kernel loads the words of 16 lanes once, and each shift by b gives the next run of 16 columns in the same threads.
"""

import torch
from torch import Tensor

from kernels.linear.grouped.form import BLOCK

LANES = 16
PLACES = BLOCK // LANES
PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (4, 4)}
"""Bits of each plane, by the bits of a code."""


def words(bits: int) -> int:
    """A block takes so many."""
    return BLOCK * bits // 32


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 [N, K] -> int32 [ceil(K / 128), N, words]; zero codes behind the last column."""
    rows, columns = codes.shape
    blocks = -(-columns // BLOCK)
    padded = torch.nn.functional.pad(codes, (0, blocks * BLOCK - columns)).view(rows, blocks, PLACES, LANES)
    parts, low = [], 0
    for plane in PLANES[bits]:
        piece = (padded >> low) & (2**plane - 1)
        shared = 4 // plane
        # [N, blocks, words, lanes of a word, places]
        piece = piece.unflatten(-1, (LANES // shared, shared)).permute(0, 1, 3, 4, 2).flatten(-2)
        shifts = torch.arange(32 // plane, device=codes.device, dtype=torch.int32) * plane
        parts.append((piece.int() << shifts).sum(-1, dtype=torch.int32))
        low += plane
    return torch.cat(parts, dim=-1).transpose(0, 1).contiguous()


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse of `pack`."""
    blocks, rows, _ = packed.shape
    codes = torch.zeros((rows, blocks, PLACES, LANES), dtype=torch.uint8, device=packed.device)
    first, low = 0, 0
    for plane in PLANES[bits]:
        count, shared = words(plane), 4 // plane
        shifts = torch.arange(32 // plane, device=packed.device, dtype=torch.int32) * plane
        piece = (packed[:, :, first : first + count, None] >> shifts) & (2**plane - 1)
        piece = piece.to(torch.uint8).unflatten(-1, (shared, PLACES)).permute(1, 0, 4, 2, 3).flatten(-2)
        codes |= piece << low
        first, low = first + count, low + plane
    return codes.flatten(1)[:, :columns].contiguous()
