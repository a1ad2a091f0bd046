"""`decode`, `verify` and `fold` in plain torch, any device: the oracle, and what a CPU serves with. In float64 where
the states are."""

import torch
from torch import Tensor

from kernels.conv.reference import convolved
from kernels.gated_delta.net import NetInputs, NetWeights, Records, gates
from kernels.gated_delta.reference import rounded, step, wide
from kernels.state_plan import ReplayRows


def decode(
    inputs: NetInputs, net: NetWeights, columns: Tensor, states: Tensor, slots: Tensor, tokens: Tensor, out: Tensor
) -> None:
    """As `gated_delta.decode`."""
    slots, tokens = slots[slots >= 0], tokens[slots >= 0]
    windows = torch.cat((wide(columns[slots]), wide(inputs.mixed[tokens, None])), dim=1)
    mixed = convolved(windows, wide(net.taps), out.dtype)
    columns[slots] = windows[:, 1:].to(columns.dtype)
    q, k, v = _heads(mixed, net)
    g, beta = gates(inputs.a[tokens], inputs.b[tokens], net)
    state = wide(states[slots])
    out[tokens] = step(q, k, v, g, beta, state).to(out.dtype)
    states[slots] = rounded(state, states.dtype)


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
    past = wide(columns[rows.slots])
    state = wide(states[rows.slots])
    for row in range(rows.longest):
        alive = ((rows.counts > row) & (rows.slots >= 0)).nonzero()[:, 0]
        tokens, places = rows.tokens[alive] + row, rows.places[alive] + row
        windows = torch.cat((past[alive], wide(inputs.mixed[tokens, None])), dim=1)
        mixed = convolved(windows, wide(net.taps), out.dtype)
        q, k, v = _heads(mixed, net)
        g, beta = gates(inputs.a[tokens], inputs.b[tokens], net)
        now = state[alive]
        out[tokens] = step(q, k, v, g, beta, now).to(out.dtype)
        state[alive] = wide(rounded(now, states.dtype))
        column = windows[:, -1].to(columns.dtype)
        past[alive] = torch.cat((windows[:, 1:-1], wide(column)[:, None]), dim=1)
        records.keys_values[layer, places] = mixed[:, net.key_width :]
        records.log_decay[layer, places] = g.to(records.log_decay.dtype)
        records.beta[layer, places] = beta.to(records.beta.dtype)
        records.columns[layer, places] = column


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
    kept = (accepted > 0) & (slots >= 0)
    slots, places, accepted = slots[kept], places[kept], accepted[kept]
    state = wide(states[slots])  # [B, layers, value_heads, K, V]
    past = columns[slots]
    for row in range(int(accepted.max()) if len(slots) else 0):
        alive = (accepted > row).nonzero()[:, 0]
        at = places[alive] + row
        k, v = _keys_values(records.keys_values[:, at].transpose(0, 1).flatten(0, 1), net)
        g, beta = (x[:, at].transpose(0, 1).flatten(0, 1) for x in (records.log_decay, records.beta))
        now = state[alive].flatten(0, 1)
        step(k, k, v, g, beta, now)
        state[alive] = wide(rounded(now, states.dtype)).unflatten(0, (len(alive), -1))
        column = records.columns[:, at].transpose(0, 1)[:, :, None]
        past[alive] = torch.cat((past[alive][:, :, 1:], column), dim=2)
    states[slots] = state.to(states.dtype)
    columns[slots] = past


def _heads(mixed: Tensor, net: NetWeights) -> tuple[Tensor, Tensor, Tensor]:
    q = mixed[:, : net.key_width].unflatten(1, (net.key_heads, net.key_dim))
    return q, *_keys_values(mixed[:, net.key_width :], net)


def _keys_values(row: Tensor, net: NetWeights) -> tuple[Tensor, Tensor]:
    k, v = row[:, : net.key_width], row[:, net.key_width :]
    return k.unflatten(1, (net.key_heads, net.key_dim)), v.unflatten(1, (net.value_heads, net.value_dim))
