"""Starts the kernels of `triton`."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.grouped import launch
from kernels.linear.grouped import triton as kernels
from kernels.linear.grouped.form import BLOCK, Layout
from kernels.linear.grouped.planes import words
from kernels.linear.grouped.weight import GroupedWeight

_few_rows: Any = kernels.few_rows
_one_row: Any = kernels.one_row
_add_splits: Any = kernels.add_splits
_decode: Any = kernels.decode


def few_rows(x: Tensor, weight: GroupedWeight, bias: Tensor | None, processors: int, dot: tl.dtype) -> Tensor:
    """x [T, K] contiguous, 1 <= T <= launch.FEW_ROWS -> [T, N] of its dtype. `processors`: multiprocessors of the
    device; `dot`: the type in which codes and x are multiplied, exactly: x's own, or float32."""
    count, blocks = len(x), len(weight.codes)
    plan = launch.few_rows(count, weight.rows, blocks, processors)
    share = -(-blocks // plan.splits)
    splits = -(-blocks // share)
    parts = torch.empty((splits, count, weight.rows), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(weight.rows, plan.tile), splits)
    sizes = (weight.rows, weight.columns, blocks, share)
    if count == 1:
        _one_row[grid](x, parts, *_arguments(weight), *sizes, **constants(weight), TILE=plan.tile, num_warps=plan.warps)
    else:
        _few_rows[grid](
            x,
            parts,
            *_arguments(weight),
            count,
            *sizes,
            **constants(weight),
            TILE=plan.tile,
            BATCH=plan.batch,
            DOT=dot,
            num_warps=plan.warps,
        )
    out = torch.empty((count, weight.rows), dtype=x.dtype, device=x.device)
    tile = 256
    _add_splits[(triton.cdiv(weight.rows, tile), count)](
        parts, parts if bias is None else bias, out, count, weight.rows, splits, BIAS=bias is not None, TILE=tile
    )
    return out


def decode(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """[N, K]."""
    out = torch.empty((weight.rows, weight.columns), dtype=dtype, device=weight.device)
    grid = (triton.cdiv(weight.rows, launch.DECODE_ROWS), len(weight.codes))
    _decode[grid](out, *_arguments(weight), weight.rows, weight.columns, **constants(weight), TILE=launch.DECODE_ROWS)
    return out


def constants(weight: GroupedWeight) -> dict[str, Any]:
    """What a kernel is compiled for."""
    layout = weight.layout
    return {
        "BITS": layout.bits,
        # A group of whole blocks has one entry in each.
        "GROUP": layout.group if BLOCK % layout.group == 0 else BLOCK,
        "SPAN": layout.span if BLOCK % layout.span == 0 or layout.span < weight.columns else _ALL,
        "ZERO": layout.zero,
        "TABLE": table_words(layout),
        "SUB_SCALES": weight.sub_scales is not None,
        "MINS": weight.mins is not None,
        "SUB_MINS": weight.sub_mins is not None,
    }


_ALL = 2**30
"""A span of more columns than any matrix has."""
_DOTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """In which codes (whole numbers up to 255 or 127 and a sign) and x are both exact."""
    return _DOTS[dtype]


def table_words(layout: Layout) -> tuple[int, ...]:
    """The table as int32 words of four int8 values, lowest code in the lowest byte; () without a table."""
    packed = b"".join(value.to_bytes(1, "little", signed=True) for value in layout.table)
    return tuple(int.from_bytes(packed[at : at + 4], "little", signed=True) for at in range(0, len(packed), 4))


def _arguments(weight: GroupedWeight) -> list[Any]:
    """Tensors, then the distances of their blocks; an absent tensor is never read."""
    given = [weight.codes, weight.scales, weight.sub_scales, weight.mins, weight.sub_mins]
    assert weight.codes.stride(1) == words(weight.layout.bits)
    return [weight.codes if t is None else t for t in given] + [0 if t is None else t.stride(0) for t in given]
