"""The chunked form by flash-linear-attention (PyPI `fla-core`), which is optional."""

import importlib.util
from functools import cache

import torch
from torch import Tensor

from kernels.state_plan import StatePlan


@cache
def _installed() -> bool:
    return importlib.util.find_spec("fla") is not None


def usable(q: Tensor) -> bool:
    """Its kernel refuses float32."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and _installed()


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, plan: StatePlan, out: Tensor
) -> None:
    """As `reference.chunked`."""
    # Imported here: it takes a second and fails where there is no GPU driver.
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyrefly: ignore[missing-import]

    packed = plan.packed
    if packed is None:
        return
    rows = (x[packed.tokens][None] for x in (q, k, v, g, beta))
    result, final = chunk_gated_delta_rule(
        *rows,
        initial_state=states[packed.slots],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=packed.borders.long(),
    )
    states[packed.slots] = final
    out[packed.tokens] = result[0].to(out.dtype)
