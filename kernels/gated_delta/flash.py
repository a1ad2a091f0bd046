"""The chunked form by flash-linear-attention (PyPI `fla-core`), which is optional."""

import importlib.util
from functools import cache

import torch
from torch import Tensor

from kernels.gated_delta.packed import PackedRows
from kernels.gated_delta.reference import rounded
from kernels.gated_delta.tiles import tiles
from kernels.state_plan import StatePlan

_CHUNK = 64
"""Tokens; its default."""


@cache
def _installed() -> bool:
    return importlib.util.find_spec("fla") is not None


def usable(q: Tensor) -> bool:
    """Its kernel refuses float32."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and _installed()


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, plan: StatePlan, out: Tensor
) -> None:
    """As `reference.chunked`, states of any dtype included. Tokens are copied where some of the step belong to no
    span."""
    spans = plan.packed
    if spans is None:
        return
    tokens = spans.tokens
    if len(tokens) == len(q):
        out.copy_(packed(PackedRows(q, k, v, g, beta, unit=False), states, plan))
    else:
        rows = PackedRows(q[tokens], k[tokens], v[tokens], g[tokens], beta[tokens], unit=False)
        out[tokens] = packed(rows, states, plan).to(out.dtype)


def packed(rows: PackedRows, states: Tensor, plan: StatePlan) -> Tensor:
    """The spans of `plan`, whose rows are copied where they are not contiguous. Returns o [N, value_heads, V] of the
    dtype of v. Raises ValueError where `plan` has no spans.

    q and k that are not `unit` cost two launches, which read and write them once. Chunks are given, since
    flash-linear-attention would ask the GPU for their number, in every layer."""
    if plan.packed is None:
        raise ValueError("no spans")
    # Imported here: it takes a second and fails where there is no GPU driver.
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyrefly: ignore[missing-import]

    cut = tiles(plan, _CHUNK, rows.v.device)
    # The state of one sequence is read where it lies.
    place = plan.packed.slots if len(plan.spans) > 1 else slice(plan.spans[0].slot, plan.spans[0].slot + 1)
    o, final = chunk_gated_delta_rule(
        *(x[None] for x in (rows.q, rows.k, rows.v, rows.g, rows.beta)),
        initial_state=states[place].float(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=not rows.unit,
        cu_seqlens=cut.borders,
        chunk_indices=cut.places,
        chunk_size=_CHUNK,
    )
    states[place] = rounded(final, states.dtype)
    return o[0]
