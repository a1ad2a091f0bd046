"""The convolution of few rows a sequence, in Triton: one that moves the columns on, or several that leave them and keep
records of what the columns would become."""

from typing import Any

from torch import Tensor

from kernels.conv import triton as kernels
from kernels.overlap import overlaps
from kernels.state_plan import ReplayRows

_CHANNELS = 128
"""A program; one warp."""
_convolve: Any = kernels.convolve
_fold: Any = kernels.fold


def convolve_one(
    x: Tensor, taps: Tensor, columns: Tensor, slots: Tensor, tokens: Tensor, first: Tensor, second: Tensor
) -> None:
    """As `causal_conv` for one row each of B sequences: sequence i has row tokens[i] of x and slot slots[i] (both int64
    [B]); where that is negative nothing is read or written.

    x [T, channels], taps [W, channels], columns [slots, W - 1, channels], channels contiguous in all. The first of them
    go to row i of `first` [B, channels of first], the others to row i of `second` [B, the others], of one dtype.
    """
    rows = ReplayRows(slots, tokens, slots, slots, 1)
    _launch(x, taps, columns, rows, first, second, columns, keep=False)


def convolve_rows(
    x: Tensor, taps: Tensor, columns: Tensor, rows: ReplayRows, first: Tensor, second: Tensor, record: Tensor
) -> None:
    """As `convolve_one` of one row after the other, bit for bit, but columns are only read. `first`, `second` and
    `record` have rows of records; record [rows, channels] gets the columns' inputs, of the columns' dtype."""
    _launch(x, taps, columns, rows, first, second, record, keep=True)


def _launch(
    x: Tensor,
    taps: Tensor,
    columns: Tensor,
    rows: ReplayRows,
    first: Tensor,
    second: Tensor,
    record: Tensor,
    keep: bool,
) -> None:
    width, channels = taps.shape
    if width < 2 or not taps.is_contiguous() or columns.stride()[1:] != (channels, 1) or x.stride(1) != 1:
        raise ValueError(f"taps {tuple(taps.shape)}, columns with strides {columns.stride()}, x with {x.stride()}")
    if record.dtype != columns.dtype:
        raise ValueError(f"records of {record.dtype}, columns of {columns.dtype}")
    _convolve[(-(-channels // _CHANNELS), len(rows.slots), rows.longest)](
        x, taps, columns, rows.slots, rows.tokens, rows.counts, rows.places, first, second, record,
        channels, first.shape[1], x.stride(0), columns.stride(0), first.stride(0), second.stride(0), record.stride(0),
        WIDTH=width, BC=_CHANNELS, RECORD=keep, PDL=x.is_cuda and overlaps(x.device),
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def fold_columns(columns: Tensor, record: Tensor, slots: Tensor, places: Tensor, accepted: Tensor) -> None:
    """Move the columns of all layers on by the first accepted[i] (int32 [B]; 0: they stay) records of sequence i, whose
    first is row places[i] (int64 [B]). columns [slots, layers, W - 1, channels], written in place; record [layers,
    rows, channels] as of `convolve_rows`."""
    past, channels = columns.shape[2:]
    if columns.stride()[2:] != (channels, 1) or record.stride(2) != 1 or record.dtype != columns.dtype:
        raise ValueError(f"columns with strides {columns.stride()}, records of {record.dtype} with {record.stride()}")
    _fold[(-(-channels // _CHANNELS), columns.shape[1], len(slots))](
        columns, record, slots, places, accepted, channels, columns.stride(0), columns.stride(1), record.stride(1),
        record.stride(0), WIDTH=past + 1, BC=_CHANNELS, num_warps=1,
    )  # fmt: skip
