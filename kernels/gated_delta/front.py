"""All that happens to the tokens of spans between their projection and the rule, in one Triton launch: convolution,
SiLU, norms of q and k, gates."""

from typing import Any

import torch
from torch import Tensor

from kernels.gated_delta import front_triton as kernels
from kernels.gated_delta.launch import span_launch
from kernels.gated_delta.net import NetInputs, NetWeights
from kernels.gated_delta.packed import PackedRows
from kernels.gated_delta.tiles import tiles
from kernels.overlap import overlap
from kernels.state_plan import StatePlan

_front: Any = kernels.front


def front(
    inputs: NetInputs,
    net: NetWeights,
    columns: Tensor,
    plan: StatePlan,
    inner: torch.dtype,
    unit: bool,
    pdl: bool | None = None,
) -> PackedRows:
    """What the rule takes of the spans of `plan`, as `conv.causal_conv` and `net.gates` compute it: q, k, v of dtype
    `inner`, contiguous. `unit`: q and k are l2-normalised, x / sqrt(sum x^2 + 1e-6), and rounded to `inner` before and
    behind.

    inputs.mixed float32, bfloat16 or float16 with any stride between tokens, as a and b. columns [slots, W - 1,
    channels], channels contiguous: one layer's view of the state pool, moved on in place, with rows rounded to its
    dtype; those of slots that are not of `plan` are neither read nor written. A span may be shorter than the
    convolution is wide, or a single token. Bit for bit what `conv.rows.convolve_one` makes of one row after the other,
    where the columns' dtype is the rows', and the gates that `gated_delta.decode` takes.

    On a GPU, or in Triton's interpreter; `pdl`: begin while the kernel before still runs, None: where the GPU can. It
    reads x 1.2 times, mostly out of the L2 the second time. Raises ValueError for layouts that the kernel does not
    read, and where `plan` has no spans.
    """
    packed = plan.packed
    if packed is None:
        raise ValueError("no spans")
    _check(inputs, net, columns)
    count, device = len(packed.tokens), inputs.mixed.device
    qk = torch.empty(2, count, net.key_heads, net.key_dim, dtype=inner, device=device)
    v = torch.empty(count, net.value_heads, net.value_dim, dtype=inner, device=device)
    g, beta = torch.empty(2, count, net.value_heads, device=device)
    wide_k, wide_v = (1 << (dim - 1).bit_length() for dim in (net.key_dim, net.value_dim))
    launch = span_launch(max(wide_k, wide_v))
    cut = tiles(plan, launch.rows, device)
    heads_k, heads_v = launch.elements // wide_k, launch.elements // wide_v
    blocks = 2 * -(-net.key_heads // heads_k) + -(-net.value_heads // heads_v) + 1
    _front[(blocks, len(cut.places))](
        inputs.mixed, inputs.a, inputs.b, net.taps, net.a_log, net.dt_bias, columns, cut.borders, cut.places,
        packed.tokens, packed.slots, qk, v, g, beta, inputs.mixed.stride(0), inputs.a.stride(0), inputs.b.stride(0),
        columns.stride(0), qk.stride(0), KEY_HEADS=net.key_heads, HEADS=net.value_heads, K=net.key_dim, V=net.value_dim,
        BK=wide_k, BV=wide_v, BH=1 << (net.value_heads - 1).bit_length(), SIZE=launch.elements, ROWS=launch.rows,
        WIDTH=len(net.taps), UNIT=unit, num_warps=launch.warps, enable_fp_fusion=False, **overlap(device, pdl),
    )  # fmt: skip
    return PackedRows(qk[0], qk[1], v, g, beta, unit)


def _check(inputs: NetInputs, net: NetWeights, columns: Tensor) -> None:
    width, channels = net.taps.shape
    if channels != 2 * net.key_width + net.value_heads * net.value_dim or not net.taps.is_contiguous() or width < 2:
        raise ValueError(f"taps {tuple(net.taps.shape)} with strides {net.taps.stride()}")
    if columns.shape[1:] != (width - 1, channels) or columns.stride()[1:] != (channels, 1):
        raise ValueError(f"columns {tuple(columns.shape)} with strides {columns.stride()}")
    for x, size in ((inputs.mixed, channels), (inputs.a, net.value_heads), (inputs.b, net.value_heads)):
        if x.shape != (len(inputs.mixed), size) or x.stride(1) != 1:
            raise ValueError(f"inputs {tuple(x.shape)} with strides {x.stride()}")
