"""What is done to the heads of q and k before their position turns them."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm of each head of q and k."""

    kind: Literal["plain", "centred"]
    """`norm_rope.rms_norm` or `norm_rope.rms_norm_centred`, whose weight is 1 + w."""
    q_weight: Tensor
    k_weight: Tensor
    """[head_dim] both."""
    eps: float
