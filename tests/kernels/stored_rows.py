"""Projected q, k, v in one wide tensor, pages full of poison, and what the torch path makes of them."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels import kv_codec, norm_rope
from kernels.kv_codec import KvForm, KvFormat, LayerKv, kv_form, layer_views
from kernels.kv_codec.head_norm import HeadNorm
from kernels.kv_codec.launches import store

PAGE = 64
_POISON = 0xA5


@dataclass(frozen=True, slots=True)
class Pages:
    """Of three layers, of which the middle one is written to."""

    pool: Tensor
    """uint8 [pages, page_bytes]"""
    form: KvForm
    kv_heads: int
    dim: int

    @property
    def kv(self) -> LayerKv:
        return layer_views(self.pool, self.form, PAGE, self.kv_heads, self.dim)[1]

    def clone(self) -> "Pages":
        return Pages(self.pool.clone(), self.form, self.kv_heads, self.dim)

    def canonical(self) -> Tensor:
        """The pool's bytes; each NaN in the layer is the same one."""
        copy = self.clone()
        for rows in (copy.kv.keys, copy.kv.values):
            for part in (rows.codes, rows.scales):
                if part.is_floating_point():
                    part[part.isnan()] = torch.nan
        return copy.pool


@dataclass(frozen=True, slots=True)
class StoredRows:
    q: Tensor
    """[T, heads, head_dim]: beside the gate, as the projection gives it."""
    k: Tensor
    v: Tensor
    """[T, kv_heads, head_dim]"""
    norm: HeadNorm | None
    cos: Tensor
    sin: Tensor
    pages: Tensor
    """int64 [T]: in random order; every seventh token is nobody's."""
    offsets: Tensor

    def blank(self, format: KvFormat) -> Pages:
        """Poisoned, with room for all."""
        form, (tokens, kv_heads, dim) = kv_form(format, self.k.dtype), self.k.shape
        size = (tokens // PAGE + 2, 3 * PAGE * kv_heads * form.row_bytes(dim))
        return Pages(torch.full(size, _POISON, dtype=torch.uint8, device=self.k.device), form, kv_heads, dim)

    def store(self, pages: Pages, pdl: bool = False) -> Tensor:
        """By the kernel; q. What lies between its heads stays as it is."""
        tokens, heads, dim = self.q.shape
        wide = torch.full((tokens, heads, 2, dim), torch.nan, dtype=self.q.dtype, device=self.q.device)
        store(
            pages.kv,
            self.q,
            self.k,
            self.v,
            self.norm,
            self.cos,
            self.sin,
            self.pages,
            self.offsets,
            wide[:, :, 0],
            pdl,
        )
        assert wide[:, :, 1].isnan().all()
        return wide[:, :, 0]

    def turned(self) -> tuple[Tensor, Tensor]:
        """q and k, normed and turned, by torch."""
        q, k = self.q, self.k
        if self.norm is not None:
            function = norm_rope.rms_norm if self.norm.kind == "plain" else norm_rope.rms_norm_centred
            q, k = function(q, self.norm.q_weight, self.norm.eps), function(k, self.norm.k_weight, self.norm.eps)
        return norm_rope.rotate(q, self.cos, self.sin), norm_rope.rotate(k, self.cos, self.sin)

    def places(self) -> tuple[Tensor, Tensor]:
        """Of those tokens that are somebody's."""
        return self.pages[self.pages >= 0], self.offsets[self.pages >= 0]

    def stored_plain(self, bound: float) -> tuple[Tensor, Tensor]:
        """q and k by the kernel, in their own type; k of nobody is zero. Asserts that they are torch's but for `bound`
        of the largest number of the head."""
        pages, somebody = self.blank("auto"), self.pages >= 0
        q, k = self.store(pages), torch.zeros_like(self.k)
        k[somebody] = pages.kv.keys.codes[self.places()]
        expected_q, expected_k = self.turned()
        for found, expected in ((q, expected_q), (k[somebody], expected_k[somebody])):
            assert bool(((found - expected).abs() <= bound * expected.abs().amax(-1, keepdim=True)).all())
        return q, k

    def assert_stored(self, found: Pages, format: KvFormat, k: Tensor) -> None:
        """As torch stores it, and nothing else changed. k as of `turned`, or what was found to be near to it. Where
        bytes of E8 differ, the points must be as near up to rounding, and nearly all bytes be the same."""
        expected, somebody = self.blank(format), self.pages >= 0
        kv_codec.write(expected.kv, k[somebody], self.v[somebody], *self.places())
        if not format.endswith("e8"):
            assert torch.equal(found.canonical(), expected.canonical()), format
            return
        differing = int((found.canonical() != expected.canonical()).sum())
        assert differing <= max(2, 1e-3 * self.k.numel()), (format, differing)
        for given, rows, others in (
            (k, found.kv.keys, expected.kv.keys),
            (self.v, found.kv.values, expected.kv.values),
        ):
            exact = kv_codec.rotate(given[somebody].float())
            errors = [
                (each.codec.decode(each.codes[self.places()], each.scales[self.places()]) - exact)
                .square()
                .unflatten(-1, (-1, 64))
                .sum(-1)
                for each in (rows, others)
            ]
            torch.testing.assert_close(errors[0], errors[1], rtol=5e-3, atol=1e-9, equal_nan=True)
            for part, other in ((rows.codes, others.codes), (rows.scales, others.scales)):
                part[self.places()] = other[self.places()]
        assert torch.equal(found.canonical(), expected.canonical()), format


def stored_rows(
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    turning: int,
    dtype: torch.dtype,
    norm: Literal["plain", "centred"] | None,
    device: str = "cpu",
    seed: int = 0,
) -> StoredRows:
    """Heavy tails and two loud channels in K."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    wide = normal(tokens, 2 * (heads + kv_heads) * dim) * (normal(tokens, 1).abs() + 0.1)
    wide = (wide * (normal(*wide.shape).abs() + 0.3)).to(device, dtype)
    q, k, v = wide.split((2 * heads * dim, kv_heads * dim, kv_heads * dim), dim=-1)
    q = q.unflatten(-1, (heads, 2 * dim))[..., :dim]
    k, v = (part.unflatten(-1, (kv_heads, dim)) for part in (k, v))
    k[..., 3] *= 20
    k[..., dim - 5] *= -20
    q_weight, k_weight = ((0.3 * normal(dim) + (norm == "plain")).to(device, dtype) for _ in range(2))
    positions = torch.randint(0, 262144, (tokens,), generator=generator).to(device)
    frequencies = 1e7 ** -(torch.arange(0, turning, 2).float() / turning)
    places = torch.randperm((tokens // PAGE + 2) * PAGE, generator=generator)[:tokens].to(device)
    nobody = torch.arange(tokens, device=device) % 7 == 3
    return StoredRows(
        q,
        k,
        v,
        None if norm is None else HeadNorm(norm, q_weight, k_weight, 1e-6),
        *norm_rope.rotary_angles(positions, frequencies.to(device)),
        torch.where(nobody, -1, places // PAGE),
        places % PAGE,
    )


_FLOAT_TIES = (
    *(448, 17, -19, 21, -23, 25, 34, 38, -42, 50, -68, 1.0625, -1.1875, 1.3125, 432, 0),
    *(6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -0.1),
    *(odd * sign / 1024 for odd in range(1, 16, 2) for sign in (1, -1)),
    *(6.375, *(1.5,) * 15),
)
"""Halfway between numbers of E4M3 (scale 1), of E2M1 (scale 1), of E4M3 below 2^-6, and a scale of E4M3 that is so."""
_LATTICE_TIES = (
    *(-8, 0.25, 1.25, 0.25, 0.25, 0.25, 0.25, 0.25),
    *(0.5,) * 8,
    *(0.75, 0.75, 0.75, 0.75, 0.75, 0.75, 0.75, 1.75),
    *(0, 0, 0, 0, 0, 0, 0, 8),
    *(8, -8, 1, 1, 1, 1, 1, 1),
    *(0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5, 4.5) * 3,
)
"""Scale 1. An odd sum at the rim of the cube; equally near cosets; equally near integers; peaks of both signs."""
_WIDE = (2.5, -0.5, 0.5, -0.5, 0.5, -0.5, 0.5, -0.5) * 8
"""At 2 bits the largest of the three scales is best."""


def extreme_rows(dim: int, rotated: bool, device: str = "cpu") -> StoredRows:
    """8 tokens, float32, not normed: zeros, scales that underflow and overflow, NaN, infinities; ties and equal peaks,
    of what a rotated or a plain format encodes."""
    rows = stored_rows(8, 1, 1, dim, dim, torch.float32, None, device)
    rows.cos[:] = 1.0
    rows.sin[:] = 0.0
    for x, ties in ((rows.k, _WIDE if rotated else _FLOAT_TIES), (rows.v, _LATTICE_TIES if rotated else _FLOAT_TIES)):
        x[0] = 0.0
        x[1] *= 1e-9
        x[2] *= 1e6
        x[4, 0, 1] = torch.nan
        x[5, 0] = torch.tensor(ties, device=device).repeat(dim // 64)
        if rotated:
            x[5] = kv_codec.rotate(x[5])  # exact, and so is the way back
        x[6, 0, 9] = torch.inf
        x[7, 0, dim - 1] = -torch.inf
    return rows
