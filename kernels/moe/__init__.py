"""The routed experts of a mixture-of-experts layer."""

from torch import Tensor

from kernels.linear.grouped.weight import GroupedWeight
from kernels.linear.weight import Weight
from kernels.moe import reference

Experts = Tensor | Weight | GroupedWeight


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The `top_k` most probable experts of each token, and their probabilities scaled to a sum of 1.

    logits [T, experts], the softmax is taken in float32. Returns (int64 [T, top_k], float32 [T, top_k]).
    """
    return reference.route(logits, top_k)


def experts(x: Tensor, chosen: Tensor, shares: Tensor, gate_up: Experts, down: Experts) -> Tensor:
    """sum_e share_e down_e(silu(gate_e(x)) * up_e(x)) over each token's chosen experts.

    x [T, hidden]. chosen int64 [T, top_k], no expert twice in a row; shares float32 [T, top_k], both as of `route`.
    gate_up [experts, 2 * width, hidden], the gate's rows first; down [experts, hidden, width]; of x's dtype, or
    packed with the experts' rows one above the other ([experts * 2 * width, hidden] and so on). Returns
    float32 [T, hidden].
    """
    return reference.experts(x, chosen, shares, gate_up, down)
