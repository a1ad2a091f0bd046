"""The short causal convolution in front of a gated delta net: depthwise, then SiLU."""

import torch
from torch import Tensor

from kernels.conv import reference
from kernels.state_plan import StatePlan


def causal_conv(x: Tensor, taps: Tensor, columns: Tensor, plan: StatePlan, dtype: torch.dtype | None = None) -> Tensor:
    """silu(sum_w taps[w] x[t - W + 1 + w]) for every token t, each channel by itself, in float32 inside.

    x [T, channels], all tokens of the step, any strides between tokens. taps [W, channels], the last one for the token
    itself. columns [slots, W - 1, channels]: one layer's view of the state pool, the inputs of the W - 1 tokens before
    the step, oldest first (zeros before the sequence's start); in place it becomes that of the tokens before the next
    step, rounded where x is wider. Returns a new tensor [T, channels] of `dtype`, else of x's; what is outside of the
    range of float16 becomes its largest number.
    """
    return reference.causal_conv(x, taps, columns, plan, dtype or x.dtype)
