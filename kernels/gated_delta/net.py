"""What a gated delta net's recurrent part works on: the layer's small weights, a step's rows, and what is kept of them.

T: tokens of a step. B: sequences. W: width of the convolution. K, V: dims of a key and of a value head. Channels of the
convolution: q [key_heads, K], k [key_heads, K], v [value_heads, V], behind each other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus


@dataclass(frozen=True, slots=True)
class NetWeights:
    """Of one layer."""

    taps: Tensor
    """[W, channels], contiguous, the last one for the token itself."""
    a_log: Tensor
    """float32 [value_heads]"""
    dt_bias: Tensor
    """float32 [value_heads]"""
    key_heads: int
    key_dim: int
    value_dim: int

    @property
    def value_heads(self) -> int:
        return len(self.a_log)

    @property
    def key_width(self) -> int:
        """Channels of q; as many are of k."""
        return self.key_heads * self.key_dim


@dataclass(frozen=True, slots=True)
class NetInputs:
    """Of one layer, for all tokens of a step. The tensors' last dim has stride 1."""

    mixed: Tensor
    """[T, channels], before the convolution."""
    a: Tensor
    """[T, value_heads], of the decay,"""
    b: Tensor
    """[T, value_heads], and of beta: see `gates`."""


def gates(a: Tensor, b: Tensor, net: NetWeights) -> tuple[Tensor, Tensor]:
    """The logarithm of the decay, g = -e^a_log softplus(a + dt_bias), and beta = sigmoid(b); all [..., value_heads]."""
    return -net.a_log.exp() * softplus(a + net.dt_bias), b.sigmoid()


@dataclass(frozen=True, slots=True)
class Records:
    """What `fold` needs of each verified row, of all layers: 1.705 MiB a row for the 27B with 16-bit dtypes."""

    keys_values: Tensor
    """[layers, rows, key_heads * K + value_heads * V]: k and v as the recurrence takes them, k not normalised."""
    log_decay: Tensor
    """float32 [layers, rows, value_heads]: g"""
    beta: Tensor
    """float32 [layers, rows, value_heads]"""
    columns: Tensor
    """[layers, rows, channels]: inputs of the convolution, rounded as its columns are."""


def empty_records(
    layers: int, rows: int, net: NetWeights, inner: torch.dtype, columns: torch.dtype, device: torch.device
) -> Records:
    """inner: of q, k, v. columns: of the convolution's columns."""
    channels, heads = net.taps.shape[1], net.value_heads
    return Records(
        keys_values=torch.empty(layers, rows, channels - net.key_width, dtype=inner, device=device),
        log_decay=torch.empty(layers, rows, heads, device=device),
        beta=torch.empty(layers, rows, heads, device=device),
        columns=torch.empty(layers, rows, channels, dtype=columns, device=device),
    )
