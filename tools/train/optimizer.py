"""Muon for the matrices of the layers, AdamW for embedding, convolution, norms and gates."""

import torch
from torch import Tensor

from tools.train.checkpoint import Parameters

MOMENTUM = 0.95
SMALLEST_MATRIX = 32
"""A matrix with a side below this (the gates of the delta net) is no use to Muon."""
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalised(gradients: Tensor) -> Tensor:
    """[m, rows, columns] -> each with its singular values pushed to about 1: five quintic Newton-Schulz steps
    (Keller Jordan's Muon), in bf16 on CUDA."""
    a, b, c = NEWTON_SCHULZ
    x = gradients.to(torch.bfloat16) if gradients.is_cuda else gradients
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(gradients.dtype)


def is_muon(name: str, value: Tensor) -> bool:
    return value.ndim == 2 and "embed" not in name and min(value.shape) >= SMALLEST_MATRIX


class Optimizer:
    """Updates the parameters in place. AdamW's rate is a fifth of Muon's."""

    def __init__(self, parameters: Parameters, rate: float, decay: float = 0.02) -> None:
        self.rate = rate
        self.decay = decay
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        others: list[Tensor] = []
        for name, value in parameters.items():
            if is_muon(name, value):
                groups.setdefault(tuple(value.shape), []).append(value)
            else:
                others.append(value)
        # matrices of one shape are updated by one batched call
        self._groups = [
            (members, torch.zeros(len(members), *shape, device=members[0].device)) for shape, members in groups.items()
        ]
        self._adam = torch.optim.AdamW(
            others, lr=rate / 5, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=others[0].is_cuda
        )
        self._all = list(parameters.values())

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update with scale * rate; every parameter must have its gradient. The gradients are dropped."""
        for group in self._adam.param_groups:
            group["lr"] = self.rate / 5 * scale
        self._adam.step()
        for members, momentum in self._groups:
            gradients = torch.stack([gradient_of(p) for p in members])
            momentum.lerp_(gradients, 1 - MOMENTUM)
            update = orthogonalised(gradients.lerp(momentum, MOMENTUM)).float()
            rate = self.rate * scale
            torch._foreach_mul_(members, 1 - rate * self.decay)
            shape_factor = max(1.0, update.size(1) / update.size(2)) ** 0.5
            torch._foreach_add_(members, list(update.unbind(0)), alpha=-rate * shape_factor)
        for parameter in self._all:
            parameter.grad = None


def gradient_of(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise ValueError(f"a parameter of shape {tuple(parameter.shape)} has no gradient")
    return parameter.grad
