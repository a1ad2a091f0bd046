"""Matrices of several formats one above the other."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels.linear import weight
from kernels.linear.grouped import form
from kernels.linear.grouped import weight as grouped
from kernels.linear.grouped.weight import GroupedWeight
from kernels.linear.quantized import dequantize
from services.engine.model.matrix import Block, Matrix, joined
from services.engine.weights.codecs import encode
from tests.engine.packed_source import quarters

COLUMNS = 96
EMPTY = partial(torch.empty, dtype=torch.float32)


def block(kind: str, rows: int, seed: int, scale_dtype: torch.dtype | None = None) -> tuple[Block, Tensor]:
    """Packed, and its values."""
    values = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(seed))
    if kind == "plain":
        return values, values
    if kind == "grouped":
        natural = quarters(values)
        return grouped.pack(natural), form.dequantize(natural)
    encoded = encode(values, kind, scale_dtype)
    return weight.pack(encoded), dequantize(encoded)


def kinds(blocks: Sequence[Block]) -> list[tuple[str, int]]:
    return [
        ("plain", len(b))
        if isinstance(b, Tensor)
        else ("grouped" if isinstance(b, GroupedWeight) else b.format, b.rows)
        for b in blocks
    ]


def test_neighbours_of_one_format_become_one_block() -> None:
    order = ("fp8", "fp8", "int4-g64", "nvfp4", "nvfp4", "plain", "plain", "grouped", "grouped", "fp8")
    made = [block(kind, 10 + seed, seed) for seed, kind in enumerate(order)]
    blocks = joined([packed for packed, _ in made])
    assert kinds(blocks) == [
        ("fp8", 21), ("int4-g64", 12), ("nvfp4", 27), ("plain", 31), ("grouped", 35), ("fp8", 19),
    ]  # fmt: skip
    values = torch.cat([values for _, values in made])
    matrix = Matrix(len(values), COLUMNS, EMPTY)
    matrix.bind(blocks)
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(99))
    bias = torch.randn(len(values), generator=torch.Generator().manual_seed(98))
    torch.testing.assert_close(matrix(x), x @ values.t(), atol=1e-4, rtol=0)
    torch.testing.assert_close(matrix(x, bias), x @ values.t() + bias, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="packed and has no dense form"):
        _ = matrix.dense


def test_what_does_not_fit_stays_apart() -> None:
    """Scales of two dtypes; a block of 128 x 128 that is cut."""
    halves = [block("int8-g32", 8, 1, torch.float16)[0], block("int8-g32", 8, 2, torch.bfloat16)[0]]
    assert kinds(joined(halves)) == [("int8-g32", 8), ("int8-g32", 8)]
    squares = [block("fp8-block", rows, rows)[0] for rows in (128, 100, 128, 256, 3)]
    assert kinds(joined(squares)) == [("fp8-block", 228), ("fp8-block", 387)]


def test_blocks_of_another_matrix_are_refused() -> None:
    matrix = Matrix(20, COLUMNS, EMPTY)
    with pytest.raises(ValueError, match="1 blocks of 10 rows; the matrix has 20 x 96"):
        matrix.bind([block("fp8", 10, 0)[0]])
    with pytest.raises(ValueError, match="the matrix has 20 x 95"):
        Matrix(20, 95, EMPTY).bind([block("fp8", 20, 0)[0]])
    with pytest.raises(ValueError, match="2 blocks; the matrix must be in one"):
        Matrix(20, COLUMNS, EMPTY, whole=True).bind([block("fp8", 10, 0)[0], block("nvfp4", 10, 1)[0]])
    assert matrix.blocks == ()


def test_memory_is_taken_once() -> None:
    matrix = Matrix(4, 3, EMPTY)
    slot = matrix.slot("name")
    slot.target.fill_(2.0)
    assert slot.shape == (4, 3)
    assert slot.target.data_ptr() == matrix.dense.data_ptr()
    assert torch.equal(matrix.take(torch.tensor([1]), torch.float32), torch.full((1, 3), 2.0))


@pytest.mark.parametrize("order", [("plain",), ("plain", "fp8", "grouped")])
def test_a_residual_of_all_blocks(order: tuple[str, ...]) -> None:
    """A wide one stays wide; what is added to it is rounded to half precision at most once."""
    made = [block(kind, 12, seed) for seed, kind in enumerate(order)]
    packed = [b.to(torch.bfloat16) if isinstance(b, Tensor) else b for b, _ in made]
    values = torch.cat([v.to(torch.bfloat16).float() if isinstance(b, Tensor) else v for b, v in made])
    matrix = Matrix(12 * len(order), COLUMNS, EMPTY)
    matrix.bind(packed)
    x = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(20)).to(torch.bfloat16)
    residual = torch.randn(5, matrix.rows, generator=torch.Generator().manual_seed(21))
    exact = x.float() @ values.t()
    for got, expected in (
        (matrix(x, residual=residual), exact + residual),
        (matrix(x, dtype=torch.float32), exact),
    ):
        assert got.dtype == torch.float32
        rounding = 2**-8 * exact.abs() + 1e-4
        assert bool(((got - expected).abs() <= rounding).all())
        torch.testing.assert_close(got[:, :12], expected[:, :12], atol=1e-4, rtol=0)  # of the plain block
    assert matrix(x).dtype == torch.bfloat16
