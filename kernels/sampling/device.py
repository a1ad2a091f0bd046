"""`draw_rows` in Triton: two launches, whatever the rows ask for.

The draw is `sampling.draw` in integers (`triton`): a weight is 2^-29 of itself and 2^-43 of the highest (at V = 248320)
from the exact one, where the reference has roundings of float64. So a draw differs from the reference's where `uniform`
or top_p lies within about 1e-8 of a border between tokens, and tokens below 2^-43 of the highest are never drawn; and
where logits differ by less than 2^-44 of the temperature, they are equals.
"""

from typing import Any

import torch
from torch import Tensor

from kernels.gpu import gpu
from kernels.sampling import triton as kernels
from kernels.sampling.launch import MOST_SEGMENTS, DrawLaunch, draw_launch
from kernels.sampling.table import DrawTable

_adjust: Any = kernels.adjust
_draw: Any = kernels.draw
_WORDS = 16 + 4 * MOST_SEGMENTS + 3 * 2048


def draw_workspace(rows: int, device: torch.device) -> Tensor:
    """int64 [rows, words], of any values, for any number of rows up to this. No two calls may use it at once."""
    return torch.empty(rows, _WORDS, dtype=torch.int64, device=device)


def draw_rows(
    logits: Tensor, table: DrawTable, workspace: Tensor, tokens: Tensor, launch: DrawLaunch | None = None
) -> None:
    """As `sampling.draw_rows`. Nothing is read by the host, so a captured call serves any fill of the table; the draw
    depends neither on the batch nor on `launch` (by default of the device). On a GPU, or in Triton's interpreter."""
    rows, vocabulary = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or not vocabulary:
        raise ValueError(f"logits {tuple(logits.shape)} of {logits.dtype} with strides {logits.stride()}")
    if tokens.dtype != torch.int64 or not tokens.is_contiguous():
        raise ValueError(f"tokens of {tokens.dtype} with strides {tokens.stride()}")
    if rows > min(table.capacity, len(workspace), len(tokens)):
        raise ValueError(f"{rows} rows, of which {table.capacity}, {len(workspace)} and {len(tokens)} have a place")
    if not rows:
        return
    if launch is None:
        launch = draw_launch(rows, vocabulary, gpu(logits.device).processors)
    strides = logits.stride(0), workspace.stride(0)
    _adjust[(launch.segments, rows)](
        logits, table.floats, table.ints, workspace, vocabulary, *strides, launch.span,
        SEGMENTS=MOST_SEGMENTS, BLOCK=launch.block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    # The programs of a row wait for each other: the driver refuses what cannot run all at once.
    together = {"launch_cooperative_grid": True} if launch.parts > 1 and logits.is_cuda else {}
    _draw[(launch.parts, rows)](
        logits, table.floats, table.ints, tokens, workspace, vocabulary, *strides, logits.stride(1), launch.segments,
        launch.span, launch.parts, launch.each, ONE=launch.one_bits, SEGMENTS=MOST_SEGMENTS, BLOCK=launch.block,
        num_warps=launch.warps, enable_fp_fusion=False, **together,
    )  # fmt: skip
