"""`decode`, `verify` and `fold` in Triton. All three give equal bits for equal tokens (replay): the kernels are made of
the same functions and started with the same launch."""

from typing import Any

from torch import Tensor

from kernels.conv.rows import convolve_one, convolve_rows, fold_columns
from kernels.gated_delta import triton as kernels
from kernels.gated_delta.launch import StateLaunch, state_launch
from kernels.gated_delta.net import NetInputs, NetWeights, Records
from kernels.overlap import overlaps
from kernels.state_plan import ReplayRows

_stream: Any = kernels.stream
_fold: Any = kernels.fold


def decode(
    inputs: NetInputs, net: NetWeights, columns: Tensor, states: Tensor, slots: Tensor, tokens: Tensor, out: Tensor
) -> None:
    """As `gated_delta.decode`. Raises ValueError for layouts that the kernels do not read; so do the others."""
    _check(net, columns, states)
    _check_out(net, out)
    if not len(slots):
        return
    # Two tensors, as for `verify`: equal alignment gives equal code.
    q = out.new_empty(len(slots), net.key_width)
    keys_values = out.new_empty(len(slots), net.taps.shape[1] - net.key_width)
    convolve_one(inputs.mixed, net.taps, columns, slots, tokens, q, keys_values)
    rows = ReplayRows(slots, tokens, slots, slots, 1)
    _start(inputs, net, states, rows, q, keys_values, out, inputs.a, inputs.b, keep=False)


def verify(
    inputs: NetInputs,
    net: NetWeights,
    columns: Tensor,
    states: Tensor,
    rows: ReplayRows,
    records: Records,
    layer: int,
    out: Tensor,
) -> None:
    """As `gated_delta.verify`."""
    _check(net, columns, states)
    _check_out(net, out)
    if not len(rows.slots) or not rows.longest:
        return
    keys_values = records.keys_values[layer]
    if keys_values.dtype != out.dtype:
        raise ValueError(f"records of {keys_values.dtype} and out of {out.dtype}")
    q = out.new_empty(len(keys_values), net.key_width)
    convolve_rows(inputs.mixed, net.taps, columns, rows, q, keys_values, records.columns[layer])
    log_decay, beta = records.log_decay[layer], records.beta[layer]
    _start(inputs, net, states, rows, q, keys_values, out, log_decay, beta, keep=True)


def fold(
    net: NetWeights,
    columns: Tensor,
    states: Tensor,
    slots: Tensor,
    places: Tensor,
    accepted: Tensor,
    records: Records,
) -> None:
    """As `gated_delta.fold`."""
    _check(net, columns[:, 0], states[:, 0])
    if not len(slots):
        return
    fold_columns(columns, records.columns, slots, places, accepted)
    launch = state_launch(net.value_dim, states.element_size())
    _fold[(-(-net.value_dim // launch.columns), states.shape[1] * net.value_heads, len(slots))](
        records.keys_values, records.log_decay, records.beta, states, slots, places, accepted,
        states.stride(0), states.stride(1), records.keys_values.stride(1), records.keys_values.stride(0),
        records.beta.stride(1), records.beta.stride(0), **_shapes(net, launch),
        num_warps=launch.warps, enable_fp_fusion=False,
    )  # fmt: skip


def _start(
    inputs: NetInputs,
    net: NetWeights,
    states: Tensor,
    rows: ReplayRows,
    q: Tensor,
    keys_values: Tensor,
    out: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    keep: bool,
) -> None:
    launch = state_launch(net.value_dim, states.element_size())
    pdl = out.is_cuda and overlaps(out.device)
    _stream[(-(-net.value_dim // launch.columns), net.value_heads, len(rows.slots))](
        q, keys_values, inputs.a, inputs.b, net.a_log, net.dt_bias, states, rows.slots, rows.tokens,
        rows.counts, rows.places, out, log_decay, beta, net.key_dim**-0.5, states.stride(0), q.stride(0),
        keys_values.stride(0), inputs.a.stride(0), inputs.b.stride(0), out.stride(0), beta.stride(0),
        **_shapes(net, launch), RECORD=keep, PDL=pdl, num_warps=launch.warps, enable_fp_fusion=False,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def _shapes(net: NetWeights, launch: StateLaunch) -> dict[str, int]:
    return {
        "HEADS": net.value_heads,
        "GROUP": net.value_heads // net.key_heads,
        "K": net.key_dim,
        "V": net.value_dim,
        "BK": 1 << (net.key_dim - 1).bit_length(),
        "BV": launch.columns,
    }


def _check(net: NetWeights, columns: Tensor, states: Tensor) -> None:
    heads, shape = net.value_heads, (net.key_dim, net.value_dim)
    if states.shape[1:] != (heads, *shape) or states.stride()[1:] != (shape[0] * shape[1], shape[1], 1):
        raise ValueError(f"states {tuple(states.shape)} with strides {states.stride()}")
    if columns.shape[1:] != (len(net.taps) - 1, net.taps.shape[1]):
        raise ValueError(f"columns {tuple(columns.shape)} for taps {tuple(net.taps.shape)}")


def _check_out(net: NetWeights, out: Tensor) -> None:
    if out.shape[1:] != (net.value_heads, net.value_dim) or not out.is_contiguous():
        raise ValueError(f"out {tuple(out.shape)} with strides {out.stride()}")
