"""What the columns of a group share, put to each of them, in place."""

from torch import Tensor


def scale_groups(values: Tensor, scales: Tensor, group: int) -> Tensor:
    """`values` [N, K] times `scales` [N, ceil(K / group)]; the last group may be smaller."""
    for part, factors in _parts(values, scales, group):
        part *= factors
    return values


def shift_groups(values: Tensor, shifts: Tensor, group: int) -> Tensor:
    """`values` [N, K] less `shifts` [N, ceil(K / group)]."""
    for part, amounts in _parts(values, shifts, group):
        part -= amounts
    return values


def _parts(values: Tensor, shared: Tensor, group: int) -> list[tuple[Tensor, Tensor]]:
    columns = values.shape[1]
    whole = columns // group
    parts = []
    if whole:
        parts.append((values[:, : whole * group].unflatten(1, (whole, group)), shared[:, :whole, None]))
    if whole * group < columns:
        parts.append((values[:, whole * group :], shared[:, whole:]))
    return parts
