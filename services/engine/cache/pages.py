"""The device's KV pages: one tensor, block-major."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.kv_codec import KvForm, kv_form, layer_views
from services.engine.config import EngineConfig, KvFormat
from services.engine.model.config import ModelConfig
from services.engine.model.hybrid_config import HybridConfig
from services.protocol.hashing import BLOCK_TOKENS
from services.settings import SettingsError, variable

LAYOUT_VERSION = 2
"""Enters the fingerprint, so that pages of another layout are never taken for ours: raise it with `KvLayout`'s."""

_HOST_BYTES = 2**30
_FEW = 8


@dataclass(frozen=True, slots=True)
class KvLayout:
    """A page is one contiguous piece of bytes, so that it moves by one copy: K and V of 64 tokens in all layers, a
    layer behind the other. How a layer lies in it: `kernels.kv_codec.layer_views`."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """The model's: of K and V before they are stored and behind."""
    format: KvFormat = "auto"
    """Stored as; "auto": as they are."""

    @classmethod
    def of(cls, config: ModelConfig | HybridConfig, dtype: torch.dtype, format: KvFormat = "auto") -> "KvLayout":
        """`layers` are those that have K and V. Raises SettingsError for a format that cannot hold such heads."""
        layout = cls(config.attention_layers, config.kv_heads, config.head_dim, dtype, format)
        if config.head_dim % (multiple := layout.form.multiple):
            raise SettingsError(
                f"{variable('kv_format')}={format}: takes heads of a multiple of {multiple} dims, and this model's "
                f"have {config.head_dim}; fp8 and bf16 take any"
            )
        return layout

    @property
    def form(self) -> KvForm:
        return kv_form(self.format, self.dtype)

    @property
    def page_bytes(self) -> int:
        return self.layers * BLOCK_TOKENS * self.kv_heads * self.form.row_bytes(self.head_dim)

    def describe(self) -> str:
        """Equal for layouts that may share blocks."""
        shape = f"{self.layers}x{BLOCK_TOKENS}x{self.kv_heads}x{self.head_dim}"
        return f"kv{LAYOUT_VERSION}:{shape}:{self.dtype}:{self.form.name}/{self.form.version}"


class KvPages:
    """`count` pages that the scheduler hands out, and one blank page behind them that pads page tables.

    Invariant: whatever lies in a page behind its last written token is zero, since `clear` runs before a page's
    first write, and zeros decode to zeros in every format. So a reader may run over a sequence's end: it finds finite
    values, whatever was there before.
    """

    def __init__(self, layout: KvLayout, count: int, device: torch.device) -> None:
        """Raises torch.OutOfMemoryError (CUDA) or RuntimeError (CPU) when the memory is not there."""
        self.layout = layout
        self.count = count
        self.blank = count
        self.tensor = torch.zeros((count + 1, layout.page_bytes), dtype=torch.uint8, device=device)
        """[count + 1, page_bytes]."""
        self.layers = tuple(layer_views(self.tensor, layout.form, BLOCK_TOKENS, layout.kv_heads, layout.head_dim))
        """K and V of each layer, views."""

    @property
    def page_bytes(self) -> int:
        return self.layout.page_bytes

    def page(self, index: int) -> Tensor:
        """The bytes of a page: a uint8 view [page_bytes]. Raises IndexError for a page that is not handed out."""
        if not 0 <= index < self.count:
            raise IndexError(f"page {index} of {self.count}")
        return self.tensor[index]

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages that are written to from their first token on in the coming step."""
        if len(pages) <= _FEW:
            # Without a tensor of their numbers, whose way to a GPU would wait for all that runs there.
            for page in pages:
                self.tensor[page].zero_()
        else:
            self.tensor[torch.tensor(pages, dtype=torch.int64).to(self.tensor.device)] = 0


def plan_pages(config: EngineConfig, layout: KvLayout) -> int:
    """How many pages the pool gets where no total is to be shared out (`memory_plan`). Raises SettingsError."""
    if config.kv_pages:
        return config.kv_pages
    memory = int(config.kv_memory) or _HOST_BYTES
    count = memory // layout.page_bytes - 1  # the blank page
    if count < 1:
        least = 2 * layout.page_bytes
        raise SettingsError(
            f"{variable('kv_memory')}: {memory} bytes hold no page of this model; it takes {least} at least"
        )
    return count
