"""The formats of K and V against their definitions, written down again value by value."""

from itertools import product
from typing import get_args

import pytest
import torch
from torch import Tensor

from kernels import kv_codec
from kernels.attention import paged_attention, plan_attention
from kernels.kv_codec import KvFormat, LayerKv, kv_form, layer_views, plain_layer, rotate
from kernels.kv_codec.e8 import E8Rows
from kernels.kv_codec.floats import Fp8Rows, Nvfp4Rows
from kernels.kv_codec.integers import Int4Rows, Int8Rows
from services.engine.config import KvFormat as KvFormatSetting
from tests.devices import DEVICES

FORMATS: tuple[KvFormat, ...] = get_args(KvFormat)
PAGE = 64
SQUARED_ERROR = {"bf16": 4e-6, "fp8": 8e-4, "int8": 4e-5, "rk8v4": 0.0078, "nvfp4": 0.0095, "rk4v4": 0.0095}
SQUARED_ERROR |= {"auto": 0.0, "rk4v4-e8": 0.0083, "rk2v4-e8": 0.1}
"""Of the energy of Gaussian rows, at most: a few percent above what is known of these quantizers."""


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(format: KvFormat, pages: int, heads: int, dim: int, device: torch.device, page: int = PAGE) -> LayerKv:
    form = kv_form(format, torch.float32)
    pool = torch.zeros((pages, page * heads * form.row_bytes(dim)), dtype=torch.uint8, device=device)
    (only,) = layer_views(pool, form, page, heads, dim)
    return only


def test_the_setting_knows_the_same_names() -> None:
    assert get_args(KvFormatSetting) == FORMATS


def test_bytes_of_the_27b() -> None:
    """16 layers of 4 heads x 256."""
    counts = {format: 64 * kv_form(format, torch.bfloat16).row_bytes(256) for format in FORMATS}
    assert counts == {
        "auto": 65536,
        "bf16": 65536,
        "int8": 33792,
        "fp8": 33024,
        "rk8v4": 26112,
        "nvfp4": 18432,
        "rk4v4": 17408,
        "rk4v4-e8": 17408,
        "rk2v4-e8": 13312,
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
def test_write_goes_to_its_places_and_nowhere_else(format: KvFormat, device: torch.device) -> None:
    form = kv_form(format, torch.float32)
    size = 8 * 3 * form.row_bytes(64)
    pool = torch.zeros((4, 2 * size), dtype=torch.uint8, device=device)
    layers = layer_views(pool, form, 8, 3, 64)
    k, v = gaussian(6, 3, 64).to(device), gaussian(6, 3, 64, seed=1).to(device)
    pages = torch.tensor([3, 3, 0, 0, 1, 3], device=device)
    offsets = torch.tensor([7, 0, 2, 3, 7, 1], device=device)
    kv_codec.write(layers[1], k, v, pages, offsets)
    every = torch.arange(4, device=device)
    for rows, given in ((layers[1].keys, k), (layers[1].values, v)):
        stored = rotate(given) if form.rotated else given
        expected = torch.zeros((4, 8, 3, 64), device=device)
        expected[pages, offsets] = rows.codec.decode(*rows.codec.encode(stored)).float()
        assert torch.equal(rows.read(every, torch.float32), expected)
    assert not pool[:, :size].any()
    assert not layers[1].keys.codes[2].any()


def test_fields_follow_each_other_head_by_head() -> None:
    """The layout that kernels read: K codes, K scales, V codes, V scales, [heads, tokens, count] each."""
    form = kv_form("rk8v4", torch.float32)
    size = PAGE * 2 * form.row_bytes(128)
    pool = torch.arange(3 * 2 * size, dtype=torch.int64).to(torch.uint8).view(3, 2 * size)
    second = layer_views(pool, form, PAGE, 2, 128)[1]
    start = size
    fields = (second.keys.codes, second.keys.scales, second.values.codes, second.values.scales)
    for view, count in zip(fields, (128, 2 * 2, 64, 4 * 2), strict=True):
        piece = pool[2, start + count * (PAGE * 1 + 5) :][:count]  # head 1, token 5
        assert torch.equal(view[2, 5, 1].contiguous().view(torch.uint8), piece)
        assert (start * view.dtype.itemsize) % 16 == 0
        start += 2 * PAGE * count
    assert start == 2 * size


@pytest.mark.parametrize("device", DEVICES)
def test_integers_value_by_value(device: torch.device) -> None:
    rows = gaussian(3, 128) * torch.tensor([[1.0], [1e-3], [900.0]])
    rows[0, 64:] = 0
    rows[1, 3] = -rows[1].abs().max() - 1e-3  # a peak below zero
    for codec, limit in ((Int8Rows(64), 127), (Int4Rows(32), 8)):
        codes, scales = codec.encode(rows.to(device))
        got = codec.decode(codes, scales).cpu()
        for row, start in product(range(3), range(0, 128, codec.group)):
            group = rows[row, start : start + codec.group]
            peak = group[group.abs().argmax()] if limit == 8 else -group.abs().max()
            scale = (peak / -limit).half()
            assert scales[row, start // codec.group] == scale
            for at, value in enumerate(group.tolist()):
                code = round(torch.tensor(value).div(scale.float()).item()) if scale else 0
                code = max(-limit, min(code, limit - (limit == 8)))
                assert got[row, start + at].item() == pytest.approx(code * scale.item(), rel=1e-7)


@pytest.mark.parametrize("device", DEVICES)
def test_small_floats_value_by_value(device: torch.device) -> None:
    rows = gaussian(4, 64) * torch.tensor([[1.0], [1e-2], [300.0], [0.0]])
    rows[2, 5] = 5000.0  # beyond what a scale of NVFP4 reaches
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes, scales = Nvfp4Rows().encode(rows.to(device))
    got = Nvfp4Rows().decode(codes, scales).cpu()
    for row, start in product(range(4), range(0, 64, 16)):
        group = rows[row, start : start + 16]
        scale = (group.abs().max() / 6).clamp(2**-9, 448).to(torch.float8_e4m3fn).float()
        nearest = ((group.abs() / scale)[:, None] - e2m1).abs().amin(-1)
        assert torch.equal(scales[row, start // 16].cpu().view(torch.float8_e4m3fn).float(), scale)
        off = ((got[row, start : start + 16] - group).abs() / scale).clamp(max=2.0)
        torch.testing.assert_close(off, nearest.clamp(max=2.0), atol=1e-5, rtol=1e-5)
    assert torch.equal(codes[3].cpu(), torch.zeros(32, dtype=torch.uint8))
    # Ties go to the even code.
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -5.0, 6, 0, 0, 0, 0, 0], device=device)
    wanted = [0, 1, 1, 2, 2, 4, 4, 0, -1, -4, 6, 0, 0, 0, 0, 0]
    assert Nvfp4Rows().decode(*Nvfp4Rows().encode(ties)).tolist() == wanted

    codes, scales = Fp8Rows().encode(rows.to(device))
    for row in range(4):
        scale = (rows[row].abs().max() / 448).half()
        expected = (rows[row] * (1 / scale.float() if scale else 0)).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(codes[row].cpu(), expected.view(torch.uint8))
        assert scales[row, 0] == scale


def lattice_points(words: Tensor, codec: E8Rows) -> Tensor:
    """What words uint8 [..., bits] stand for, in units of the scale: [..., 8]."""
    repeated = words.flatten(0, -2)
    rows = repeated.repeat(1, codec.group // 8)
    return codec.decode(rows, torch.ones((len(rows), 1), dtype=torch.float16))[:, :8]


def test_two_bits_are_all_points_of_the_lattice_in_the_cube() -> None:
    codec = E8Rows(2, 64)
    words = torch.arange(65536)
    table = lattice_points(torch.stack((words & 255, words >> 8), dim=-1).to(torch.uint8), codec)
    assert len(table.unique(dim=0)) == 65536
    # E8 moved by a quarter: all integers or all halves, with an even sum.
    doubled = 2 * (table - 0.25)
    assert torch.equal(doubled, doubled.round())
    parity = doubled % 2
    assert torch.equal(parity, parity[:, :1].expand(-1, 8))
    sums = (table - 0.25 - parity / 2).sum(-1)
    assert torch.equal(sums % 2, torch.zeros(65536))
    # The nearest of all of them is taken, also for rows beyond the cube.
    groups = 1.3 * gaussian(20, 64)
    points, coset = codec.nearest(groups[:, None], torch.ones(20, 1, dtype=torch.float16))
    found = (points + coset[..., None] / 2 + 0.25).view(-1, 8)
    distances = torch.cdist(groups.view(-1, 8), table)
    torch.testing.assert_close((found - groups.view(-1, 8)).norm(dim=-1), distances.amin(-1), atol=1e-4, rtol=1e-4)


def test_four_bits_are_the_nearest_points_too() -> None:
    """No minimal vector of the lattice leads to a nearer point of the cube, and every code stands for another point."""
    codec = E8Rows(4, 64)
    pairs = [
        [float(sign_i * (d == i) + sign_j * (d == j)) for d in range(8)]
        for i in range(8)
        for j in range(i)
        for sign_i, sign_j in product((1, -1), repeat=2)
    ]
    halves = [list(signs) for signs in product((0.5, -0.5), repeat=8) if sum(sign < 0 for sign in signs) % 2 == 0]
    minimal = torch.tensor(pairs + halves)
    assert len(minimal) == 240
    rows = gaussian(40, 64)
    codes, scales = codec.encode(rows)
    chosen = (codec.decode(codes, scales) / scales.float()).view(-1, 8)
    wanted = (rows / scales.float()).view(-1, 8)
    others = chosen[:, None] + minimal
    inside = (others.abs() <= 7.75).all(-1)
    distance = (others - wanted[:, None]).square().sum(-1).where(inside, torch.inf)
    assert bool(((chosen - wanted).square().sum(-1) <= distance.amin(-1) + 1e-4).all())

    words = torch.randint(0, 256, (5000, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)).unique(
        dim=0
    )
    points = lattice_points(words, codec)
    assert len(points.unique(dim=0)) == len(words)
    assert bool((points.abs() <= 7.75).all())
    again, coset = codec.nearest(points[:, None], torch.ones(len(points), 1, dtype=torch.float16))
    assert torch.equal(codec.pack(again, coset)[:, 0], words)


@pytest.mark.parametrize("device", DEVICES)
def test_rotation_is_sylvester_s_matrix(device: torch.device) -> None:
    matrix = torch.ones(1, 1)
    while len(matrix) < 64:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    x = gaussian(5, 3, 128).to(device)
    expected = (x.view(5, 3, 2, 64) @ (matrix / 8).to(device)).flatten(-2)
    torch.testing.assert_close(rotate(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotate(rotate(x)), x, atol=1e-5, rtol=1e-5)
    assert rotate(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("format", FORMATS)
def test_errors_blank_rows_and_broken_rows(format: KvFormat) -> None:
    form = kv_form(format, torch.float32)
    rows = gaussian(2000, 256)
    for codec in (form.keys, form.values):
        codes, scales = codec.encode(rows)
        error = (codec.decode(codes, scales).float() - rows).square().sum() / rows.square().sum()
        assert error <= SQUARED_ERROR[format]
        assert not codec.decode(torch.zeros_like(codes), torch.zeros_like(scales)).any()
        assert not codec.decode(*codec.encode(torch.zeros(2, 256))).any()
        broken = rows[:3].clone()
        broken[0, 3], broken[1, 100], broken[2, 255] = torch.nan, torch.inf, -torch.inf
        got = codec.decode(*codec.encode(broken))
        assert not got[[0, 1, 2], [3, 100, 255]].isfinite().any()


@pytest.mark.parametrize("codec", [Int8Rows(64), Int4Rows(64), Int4Rows(32), Fp8Rows()])
def test_what_was_stored_is_stored_as_it_is(codec: Int8Rows | Int4Rows | Fp8Rows) -> None:
    rows = gaussian(500, 128) * torch.logspace(-2, 3, 500)[:, None]
    codes, scales = codec.encode(rows)
    again = codec.encode(codec.decode(codes, scales))
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
def test_attention_reads_what_was_written(format: KvFormat, device: torch.device) -> None:
    """Prefill and decode rows against attention over the decoded rows, rotated back; pages in random order, and broken
    ones beside them."""
    heads, dim, blank = 2, 128, 9
    kv = layer(format, blank + 1, heads, dim, device)
    tables = [[4, 7], [2, 8, 0], [5]]
    counts, contexts = [70, 1, 1], [100, 150, 33]
    for rows in (kv.keys, kv.values):
        rows.codes[[1, 3, 6]] = rows.codec.encode(torch.full((dim,), torch.nan))[0].to(device)
        rows.scales[[1, 3, 6]] = rows.codec.encode(torch.full((dim,), torch.nan))[1].to(device)
    back: list[Tensor] = []
    for seed, (context, table) in enumerate(zip(contexts, tables, strict=True)):
        k, v = (gaussian(context, heads, dim, seed=2 * seed + n).to(device) for n in range(2))
        places = torch.arange(context, device=device)
        kv_codec.write(kv, k, v, torch.tensor(table, device=device)[places // PAGE], places % PAGE)
        for codec, given in ((kv.form.keys, k), (kv.form.values, v)):
            stored = codec.decode(*codec.encode(rotate(given) if kv.form.rotated else given))
            back.append((rotate(stored) if kv.form.rotated else stored).double())
    q = gaussian(sum(counts), 3 * heads, dim, seed=9).to(device)
    plan = plan_attention(counts, contexts, tables, PAGE, blank, device)
    got = paged_attention(q, kv, plan, dim**-0.5)
    first = 0
    for n, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        k, v = (each.repeat_interleave(3, dim=1) for each in back[2 * n : 2 * n + 2])
        scores = torch.einsum("qhd,khd->hqk", q[first : first + count].double(), k) * dim**-0.5
        hidden = torch.arange(context, device=device) > torch.arange(context - count, context, device=device)[:, None]
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", shares, v)
        torch.testing.assert_close(got[first : first + count].double(), expected, atol=1e-5, rtol=1e-4)
        first += count


def test_plain_rows_are_not_copied() -> None:
    keys, values = gaussian(3, 4, 2, 8), gaussian(3, 4, 2, 8)
    kv = plain_layer(keys, values)
    assert kv.keys.codes.data_ptr() == keys.data_ptr()
    kv_codec.write(kv, torch.ones(1, 2, 8), torch.zeros(1, 2, 8), torch.tensor([2]), torch.tensor([3]))
    assert bool((keys[2, 3] == 1).all())
