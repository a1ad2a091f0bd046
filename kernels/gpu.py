"""What launches depend on of a GPU."""

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True)
class Gpu:
    processors: int
    """Multiprocessors."""
    capability: tuple[int, int]


@lru_cache(maxsize=8)
def gpu(device: torch.device) -> Gpu:
    """Raises what torch raises where there is none."""
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.multi_processor_count, (properties.major, properties.minor))
