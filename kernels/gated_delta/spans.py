"""The spans of a step, from the convolution's input to o, on a GPU."""

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from kernels.gated_delta import flash, reference
from kernels.gated_delta.front import front
from kernels.gated_delta.net import NetInputs, NetWeights
from kernels.state_plan import StatePlan, StateSpan


def prefill(
    inputs: NetInputs, net: NetWeights, columns: Tensor, states: Tensor, plan: StatePlan, inner: torch.dtype
) -> Tensor:
    """Returns o [T, value_heads, V] of dtype `inner`, contiguous: the rows of the spans of `plan`. Those of other
    tokens hold anything. columns and states are as for `gated_delta.decode`, moved on in place; a state of 16 bits is
    rounded once a span. Raises ValueError where `plan` has none.

    The convolution, the norms and the gates are one launch (`front`); the rule is flash-linear-attention's where it is
    installed and takes `inner`, else plain torch. No tensor of tokens is copied where all of the step belong to spans;
    else o is, once. Waits for the GPU in a step's first layer only, where spans of these lengths are new to `tiles`; so
    no graph can capture it.
    """
    if plan.packed is None:
        raise ValueError("no spans")
    fast = flash.usable(inputs.mixed.new_empty(0, dtype=inner))
    rows = front(inputs, net, columns, plan, inner, unit=fast)
    if fast:
        o = flash.packed(rows, states, plan)
    else:
        o = torch.empty_like(rows.v)
        reference.chunked(rows.q, rows.k, rows.v, rows.g, rows.beta, states, _packed(plan), o)
    if len(o) == len(inputs.mixed):
        return o
    out = o.new_empty(len(inputs.mixed), *o.shape[1:])
    out[plan.packed.tokens] = o
    return out


def _packed(plan: StatePlan) -> StatePlan:
    """The same spans in a batch of nothing else."""
    ends = accumulate(span.count for span in plan.spans)
    spans = (StateSpan(end - span.count, span.count, span.slot) for end, span in zip(ends, plan.spans, strict=True))
    return replace(plan, spans=tuple(spans))
