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
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._known.add(tensor.untyped_storage()._cdata)  # it was there before, or is counted already
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._known:
                storage = tensor.untyped_storage()
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes
