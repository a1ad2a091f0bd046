"""Programmatic dependent launch: a kernel begins before the one before it has ended, and waits for it itself."""

import torch

from kernels.gpu import gpu


def overlaps(device: torch.device) -> bool:
    """Whether the GPU can: compute capability 9.0 and up."""
    return device.type == "cuda" and gpu(device).capability >= (9, 0)


def overlap(device: torch.device, pdl: bool | None) -> dict[str, bool]:
    """Options of a launch whose kernel waits if PDL. pdl: whether it begins early; None: where the GPU can."""
    early = overlaps(device) if pdl is None else pdl and device.type == "cuda"
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}
