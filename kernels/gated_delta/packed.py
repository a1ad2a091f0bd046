"""What the rule takes of the spans of a step, span behind span."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of the packed tokens (`state_plan.PackedSpans`), N in all."""

    q: Tensor
    """[N, key_heads, K]"""
    k: Tensor
    """[N, key_heads, K]"""
    v: Tensor
    """[N, value_heads, V]"""
    g: Tensor
    """float32 [N, value_heads]: the logarithm of the decay"""
    beta: Tensor
    """float32 [N, value_heads]"""
    unit: bool
    """q and k are l2-normalised."""
