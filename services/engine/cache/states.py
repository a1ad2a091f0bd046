"""The device's recurrent states: one slot a running request or checkpoint."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.config import EngineConfig, StateDtype
from services.engine.model.hybrid_config import HybridConfig
from services.settings import SettingsError, variable

LAYOUT_VERSION = 1
"""Enters the fingerprint, so that a slot of another layout is never taken for ours: raise it with `StateLayout`'s."""

_ALIGNMENT = 256
_CHECKPOINTS = 256
"""Slots wished for beside those of the running requests."""
_HOST_BYTES = 2**30
_DTYPES: Mapping[StateDtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class StateLayout:
    """A slot is one piece of `state_bytes` bytes, so that a checkpoint moves by one copy: behind each other the states
    of all delta net layers (`state_dtype` [layers, value_heads, key_dim, value_dim]), their convolution columns
    ([layers, past, channels], oldest first) and the last hidden vector behind the final norm ([hidden])."""

    layers: int
    value_heads: int
    key_dim: int
    value_dim: int
    past: int
    """Columns of the convolution: its width - 1."""
    channels: int
    hidden: int
    dtype: torch.dtype
    """Of columns and hidden vector: the model's, so that nothing is lost."""
    state_dtype: torch.dtype = torch.float32
    """Of the states as they are stored; they are computed in float32."""

    @classmethod
    def of(cls, config: HybridConfig, dtype: torch.dtype, state_dtype: StateDtype = "float32") -> "StateLayout":
        """`dtype`: the model's."""
        net = config.delta_net
        return cls(
            layers=config.delta_net_layers,
            value_heads=net.value_heads,
            key_dim=net.key_dim,
            value_dim=net.value_dim,
            past=net.conv_width - 1,
            channels=net.channels,
            hidden=config.hidden_size,
            dtype=dtype,
            state_dtype=_DTYPES[state_dtype],
        )

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return (self.layers, self.value_heads, self.key_dim, self.value_dim)

    @property
    def columns_offset(self) -> int:
        """Bytes from the slot's start, as the others."""
        return _aligned(self.state_dtype.itemsize * math.prod(self.state_shape))

    @property
    def hidden_offset(self) -> int:
        return self.columns_offset + _aligned(self.layers * self.past * self.channels * self.dtype.itemsize)

    @property
    def state_bytes(self) -> int:
        return self.hidden_offset + _aligned(self.hidden * self.dtype.itemsize)

    def describe(self) -> str:
        """Equal for layouts that may share checkpoints."""
        shapes = "x".join(map(str, (*self.state_shape, self.past, self.channels, self.hidden)))
        return f"state{LAYOUT_VERSION}:{shapes}:{self.dtype}:{self.state_dtype}"


class StatePool:
    """`count` slots that the scheduler hands out."""

    def __init__(self, layout: StateLayout, count: int, device: torch.device) -> None:
        """Raises torch.OutOfMemoryError (CUDA) or RuntimeError (CPU) when the memory is not there."""
        self.layout = layout
        self.count = count
        self.tensor = torch.zeros((count, layout.state_bytes), dtype=torch.uint8, device=device)
        """[count, state_bytes]."""
        half, columns, hidden = layout.dtype, layout.columns_offset, layout.hidden_offset
        width = layout.layers * layout.past * layout.channels
        self.states = self._view(layout.state_dtype, 0, math.prod(layout.state_shape)).unflatten(1, layout.state_shape)
        """`layout.state_dtype` [count, layers, value_heads, key_dim, value_dim], a view; so are the next two."""
        self.columns = self._view(half, columns, width).unflatten(1, (layout.layers, layout.past, layout.channels))
        """[count, layers, past, channels]."""
        self.hidden = self._view(half, hidden, layout.hidden)
        """[count, hidden]."""

    def _view(self, dtype: torch.dtype, offset: int, length: int) -> Tensor:
        """`length` elements from byte `offset` on of every slot."""
        first = offset // dtype.itemsize
        return self.tensor.view(dtype)[:, first : first + length]

    @property
    def state_bytes(self) -> int:
        return self.layout.state_bytes

    def check(self, slot: int) -> None:
        """Raises IndexError for a slot that is not handed out."""
        if not 0 <= slot < self.count:
            raise IndexError(f"state {slot} of {self.count}")

    def slot(self, index: int) -> Tensor:
        """The bytes of a slot: a uint8 view [state_bytes]. Raises IndexError."""
        self.check(index)
        return self.tensor[index]

    def clear(self, slots: Sequence[int]) -> None:
        """Make them those of sequences that have read nothing."""
        if slots:
            self.tensor[torch.tensor(slots, dtype=torch.int64).to(self.tensor.device)] = 0


def plan_states(config: EngineConfig, layout: StateLayout) -> int:
    """How many slots the pool gets where no total is to be shared out (`memory_plan`). Raises SettingsError."""
    if config.states:
        return config.states
    count = min(config.max_running + _CHECKPOINTS, _HOST_BYTES // layout.state_bytes)
    if count < 1:
        raise SettingsError(
            f"{variable('states')}: {_HOST_BYTES} bytes hold no state of this model, which takes "
            f"{layout.state_bytes}; write 1 or more to take them nevertheless"
        )
    return count


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
