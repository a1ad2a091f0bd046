"""The device's KV pages: one tensor, block-major."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.config import EngineConfig
from services.engine.model.config import ModelConfig
from services.engine.model.hybrid_config import HybridConfig
from services.protocol.hashing import BLOCK_TOKENS
from services.settings import SettingsError, variable

LAYOUT_VERSION = 1
"""Enters the fingerprint, so that pages of another layout are never taken for ours: raise it with `KvLayout`'s."""

_DEFAULT_CPU_BYTES = 2**30
_CUDA_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class KvLayout:
    """A page is [layers, 2 (K, V), 64 tokens, kv_heads, head_dim], contiguous.

    So a page moves by one copy, a token's K (or V) of a layer is one contiguous piece to write, and a gather of pages
    gives a sequence's tokens in order without a second copy.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, config: ModelConfig | HybridConfig, dtype: torch.dtype) -> "KvLayout":
        """`layers` are those that have K and V."""
        return cls(layers=config.attention_layers, kv_heads=config.kv_heads, head_dim=config.head_dim, dtype=dtype)

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        return (self.layers, 2, BLOCK_TOKENS, self.kv_heads, self.head_dim)

    @property
    def page_bytes(self) -> int:
        return 2 * self.layers * BLOCK_TOKENS * self.kv_heads * self.head_dim * self.dtype.itemsize

    def describe(self) -> str:
        """Equal for layouts that may share blocks."""
        return f"kv{LAYOUT_VERSION}:{'x'.join(map(str, self.page_shape))}:{self.dtype}"


class KvPages:
    """`count` pages that the scheduler hands out, and one blank page behind them that pads page tables.

    Invariant: whatever lies in a page behind its last written token is zero, since `clear` runs before a page's
    first write. So a reader may run over a sequence's end: it finds finite values, whatever was there before.
    """

    def __init__(self, layout: KvLayout, count: int, device: torch.device) -> None:
        """Raises torch.OutOfMemoryError (CUDA) or RuntimeError (CPU) when the memory is not there."""
        self.layout = layout
        self.count = count
        self.blank = count
        self.tensor = torch.zeros((count + 1, *layout.page_shape), dtype=layout.dtype, device=device)
        """[count + 1, layers, 2, 64, kv_heads, head_dim]."""

    @property
    def page_bytes(self) -> int:
        return self.layout.page_bytes

    def page(self, index: int) -> Tensor:
        """The bytes of a page: a uint8 view [page_bytes]. Raises IndexError for a page that is not handed out."""
        if not 0 <= index < self.count:
            raise IndexError(f"page {index} of {self.count}")
        return self.tensor[index].view(-1).view(torch.uint8)

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages that are written to from their first token on in the coming step."""
        if pages:
            self.tensor[torch.tensor(pages, dtype=torch.int64).to(self.tensor.device)] = 0


def plan_pages(config: EngineConfig, layout: KvLayout, device: torch.device) -> int:
    """How many pages the pool gets; to be asked after the weights are on the device. Raises SettingsError."""
    if config.kv_pages:
        return config.kv_pages
    memory = int(config.kv_memory)
    if not memory:
        memory = int(torch.cuda.mem_get_info(device)[0] * _CUDA_SHARE) if device.type == "cuda" else _DEFAULT_CPU_BYTES
    count = memory // layout.page_bytes - 1  # the blank page
    if count < 1:
        least = 2 * layout.page_bytes
        raise SettingsError(
            f"{variable('kv_memory')}: {memory} bytes hold no page of this model; it takes {least} at least"
        )
    return count
