"""What a piece of torch code holds at its peak."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, as long as each lives; not what an operation takes for
    itself while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._see((args, kwargs), counted=False)  # they were there before, or are known already
        out = func(*args, **(kwargs or {}))
        self._see(out, counted=True)
        self.peak = max(self.peak, self.now)
        return out

    def _see(self, tensors: Any, counted: bool) -> None:
        for tensor in tree_leaves(tensors):
            if not isinstance(tensor, Tensor) or (storage := tensor.untyped_storage())._cdata in self._known:
                continue
            self._known.add(storage._cdata)
            nbytes = storage.nbytes() if counted else 0
            self.now += nbytes
            # Also where it does not count: the next storage at its address is another one.
            weakref.finalize(storage, self._freed, storage._cdata, nbytes)

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes
