"""What is done to each element between two products: gates and sums. On a GPU each is one launch."""

from torch import Tensor

from kernels.elementwise import reference


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), the sigmoid rounded to gate's dtype and the product to x's. x and gate [..., N], of one shape
    and of any float dtypes and strides. Returns a new tensor of x's shape and dtype, contiguous on a GPU."""
    if x.is_cuda:
        from kernels.elementwise import launches  # triton exists on Linux only

        return launches.sigmoid_gated(x, gate)
    return reference.sigmoid_gated(x, gate)


def silu_gated(gate_up: Tensor) -> Tensor:
    """silu(g) * u of [g | u] [T, 2 N] (Shazeer 2020), both rounded to its dtype; any stride of rows. Returns [T, N]."""
    if gate_up.is_cuda:
        from kernels.elementwise import launches  # triton exists on Linux only

        return launches.silu_gated(gate_up)
    return reference.silu_gated(gate_up)


def add(residual: Tensor, x: Tensor) -> Tensor:
    """residual + x, two of one shape, of the dtype that torch gives it. A new tensor."""
    if residual.is_cuda:
        from kernels.elementwise import launches  # triton exists on Linux only

        return launches.add(residual, x)
    return reference.add(residual, x)
