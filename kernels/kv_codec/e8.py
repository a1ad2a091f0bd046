"""Rows as points of the lattice E8, the densest in 8 dimensions: at equal bits 12% less squared error than integers.

E8 is D8 (integer points with an even sum) and D8 + 1/2. The codes are those of E8 + 1/4 inside a cube, so that the code
is symmetric about 0: a point is r + c / 2 + 1/4 with c the coset (0 or 1) and r_i in [-2^(bits-1), 2^(bits-1) - 1] with
an even sum. Since the sum tells the lowest bit of r_7, the coset takes its place: every point of the lattice that is
inside the cube has its code, and 8 dims take exactly 8 * bits bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.kv_codec.rows import scaled

_CENTRE = 0.25
_PEAK = 8.0
"""In units of the scale at 4 bits. The cube ends at 7.75: the little that is cut is less than a wider grid loses (on
Gaussian rows: squared error .00833 of the energy at 7.75, .00800 at 8, .00803 at 8.5)."""
_SPREADS = (0.75, 0.95, 1.15)
"""Scales to be tried at 2 bits, in units of the group's root mean square. At .95 alone the squared error of Gaussian
rows is 2% higher, of rotated heavy-tailed ones 13%."""


@dataclass(frozen=True, slots=True)
class E8Rows:
    """`bits` is 4 or 2; a float16 scale for each `group` dims. 4 bits: scale = fp16(max|x| / 8). 2 bits: the best of
    three scales by squared error (ties: the first), fitted to the chosen points by least squares.

    encode(decode(...)) is close to the identity, but at 4 bits 2% of the bytes differ on Gaussian rows.

    The codes of dims 8j .. 8j + 7 are a little-endian word of 8 * bits bits, dim 8j in the lowest ones, each r_i in
    two's complement.
    """

    bits: int
    group: int

    @property
    def multiple(self) -> int:
        return self.group

    @property
    def code_dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float16

    def code_count(self, dim: int) -> int:
        return dim * self.bits // 8

    def scale_count(self, dim: int) -> int:
        return dim // self.group

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        groups = rows.float().unflatten(-1, (-1, self.group))
        if self.bits == 4:
            scales = (groups.abs().amax(-1) / _PEAK).half()
            return self.pack(*self.nearest(groups, scales)).flatten(-2), scales
        root_mean_square = groups.square().mean(-1).sqrt()
        found: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        for spread in _SPREADS:
            points, coset = self.nearest(groups, (root_mean_square * spread).half())
            values = _values(points, coset).flatten(-2)
            scales = ((groups * values).sum(-1) / values.square().sum(-1)).half()
            error = (groups - values * scales.float()[..., None]).square().sum(-1)
            if found is None:
                found = (error, points, coset, scales)
            else:
                better = error < found[0]
                found = (
                    torch.where(better, error, found[0]),
                    torch.where(better[..., None, None], points, found[1]),
                    torch.where(better[..., None], coset, found[2]),
                    torch.where(better, scales, found[3]),
                )
        assert found is not None
        return self.pack(found[1], found[2]).flatten(-2), found[3]

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        values = _values(*self._unpack(codes)).flatten(-2).unflatten(-1, (-1, self.group))
        return (values * scales.float()[..., None]).flatten(-2)

    def nearest(self, groups: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """groups float32 [..., n, group] -> r int32 [..., n, group / 8, 8] and coset int32 [..., n, group / 8] of the
        nearest points inside the cube, in units of the scales (Conway and Sloane 1982, "Fast quantizing and decoding
        algorithms for lattice quantizers"). Equally near: the integer coset."""
        x = scaled(groups, scales).unflatten(-1, (-1, 8)) - _CENTRE
        whole, half = self._nearest_d8(x), self._nearest_d8(x - 0.5)
        coset = (x - 0.5 - half).square().sum(-1) < (x - whole).square().sum(-1)
        return torch.where(coset[..., None], half, whole).int(), coset.int()

    def _nearest_d8(self, x: Tensor) -> Tensor:
        """The nearest integer points with an even sum and all coordinates in range, float32 like x [..., 8]: round, and
        where the sum is odd take the second nearest integer in the coordinate where that costs least (the first of
        equals)."""
        low, high = -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) - 1
        x = x.clamp(low, high)
        rounded = x.round()
        rest = x - rounded
        where = rest.abs().argmax(-1, keepdim=True)
        up = (rest.gather(-1, where) > 0) | (rounded.gather(-1, where) == low)
        odd = rounded.sum(-1, keepdim=True) % 2
        return rounded.scatter_add(-1, where, torch.where(up, odd, -odd))

    def pack(self, points: Tensor, coset: Tensor) -> Tensor:
        """r [..., 8] and coset [...] -> uint8 [..., bits]."""
        last = (points[..., 7] & ~1) | coset
        codes = torch.cat((points[..., :7], last[..., None]), dim=-1) & (2**self.bits - 1)
        each = 8 // self.bits
        shifts = torch.arange(0, 8, self.bits, dtype=torch.int32, device=points.device)
        return (codes.unflatten(-1, (-1, each)) << shifts).sum(-1).to(torch.uint8).flatten(-2)

    def _unpack(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 [..., D * bits / 8] -> r int8 [..., D / 8, 8] and coset [..., D / 8]. Most of it on whole words, as a
        kernel would."""
        words = codes.view(torch.int32 if self.bits == 4 else torch.int16)
        last = 7 * self.bits
        coset = (words >> last) & 1
        # The lowest bits of r_0 to r_6, folded into one.
        parity = words & sum(1 << self.bits * dim for dim in range(7))
        for distance in (4, 2, 1):
            parity = parity ^ (parity >> distance * self.bits)
        packed = ((words & ~(1 << last)) | ((parity & 1) << last)).view(torch.uint8)
        # To the top of a byte and back: the shift to the right brings the sign along.
        fields = [(packed << up).view(torch.int8) >> (8 - self.bits) for up in range(8 - self.bits, -1, -self.bits)]
        return torch.stack(fields, dim=-1).flatten(-2).unflatten(-1, (-1, 8)), coset


def _values(points: Tensor, coset: Tensor) -> Tensor:
    """float32 like points."""
    return points.float() + (coset.float() * 0.5 + _CENTRE)[..., None]
