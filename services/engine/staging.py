"""Bytes that the host writes for a step while the device still runs the one before."""

import torch
from torch import Tensor


class Staging:
    """A piece of device memory that stays where it is, and three of host memory that it is filled from in turn. Copies
    are enqueued, and read the host when their turn comes: the host may write for a fourth time when the device has done
    the first copy."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(3)]

    def host(self) -> Tensor:
        """To be written now: uint8 [size], which holds what was written three times ago."""
        self._hosts.append(self._hosts.pop(0))
        return self._hosts[0]

    def copy(self) -> None:
        """Enqueue the copy of what was written."""
        self.device.copy_(self._hosts[0], non_blocking=True)
