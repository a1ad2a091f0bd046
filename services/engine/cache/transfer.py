"""The worker half of offload: moves pages and states between the device and the kvstore's arena."""

import contextlib
import logging
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from services.engine.batch import Transfer
from services.engine.cache.arena import Arena
from services.engine.cache.pages import KvPages
from services.engine.cache.states import StatePool

log = logging.getLogger(__name__)

_PIECE = 64 * 2**20
"""Bytes of the arena registered with CUDA at a time, on first use. The arena's memory is taken as it fills, and
registering takes it. At the rates of an H200 host (first touch 3.9 GiB/s, registering touched memory 0.055 s/GiB) a
piece holds the loop up for 16 ms, or 4 ms if it was written before."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What became of transfers since the last call. Ids are those of `Transfer.id`."""

    done: tuple[int, ...]
    failed: tuple[int, ...]
    """Nothing of them is under way any more: their page, slot and extents may be given to others."""
    pending: int


class PageTransfers(Protocol):
    """Copies whole pages and state slots, byte for byte. All calls come from the runner's thread."""

    def start(self, transfers: Iterable[Transfer]) -> None:
        """Begin copies; to be called before the step's compute is launched. One that cannot be done comes out of
        `poll` as failed. Raises only when the device is unusable."""
        ...

    def poll(self) -> Progress: ...

    def close(self) -> None:
        """Wait for what is under way and let go of the arenas."""
        ...


def page_transfers(pages: KvPages, states: StatePool | None = None) -> PageTransfers:
    """The transfers for the device that `pages`, and `states` where the model has some, lie on."""
    kind = CudaTransfers if pages.tensor.device.type == "cuda" else CpuTransfers
    return kind(pages, states)


def _cuda() -> Any:
    """The CUDA runtime's functions, which torch does not type."""
    return torch.cuda.cudart()


def _forget_error(device: torch.device) -> None:
    """The runtime keeps the code of a failed call as this thread's last error, and the next kernel launch, which may be
    the model's, would take it for its own and raise. torch has nothing to clear it with: let a launch of no use take
    it."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)


class _HostMemory:
    """An arena as a uint8 tensor, page-locked piece by piece where CUDA copies from it."""

    def __init__(self, view: memoryview, device: torch.device) -> None:
        """`device`: the one that copies from and to it."""
        self._bytes: Tensor | None = torch.frombuffer(view, dtype=torch.uint8)
        self._device = device
        self._register = device.type == "cuda"
        self._registered: set[int] = set()

    def slices(self, offset: int, length: int) -> Iterator[tuple[Tensor, bool]]:
        """The bytes [offset, offset + length), cut where pieces meet, so that one copy never spans two; and whether
        they can be copied only by way of other memory. That is so where this has not locked them: somebody else may
        have locked a part, and CUDA refuses a copy that begins inside such a part and ends outside."""
        assert self._bytes is not None, "closed"
        end = offset + length
        while offset < end:
            piece = offset // _PIECE
            cut = min(end, (piece + 1) * _PIECE)
            if self._register and piece not in self._registered:
                self._lock(piece)
            yield self._bytes[offset:cut], self._device.type == "cuda" and piece not in self._registered
            offset = cut

    def _lock(self, piece: int) -> None:
        assert self._bytes is not None
        memory = self._bytes[piece * _PIECE : (piece + 1) * _PIECE]
        error = int(_cuda().cudaHostRegister(memory.data_ptr(), len(memory), 0))
        if error:
            # Copies by way of pageable memory are slow and hold the loop up, but right.
            log.warning("cannot page-lock the kvstore's arena (CUDA error %d): offload will be slow", error)
            self._register = False
            _forget_error(self._device)
        else:
            self._registered.add(piece)

    def close(self) -> None:
        if self._bytes is not None:
            for piece in self._registered:
                _cuda().cudaHostUnregister(self._bytes[piece * _PIECE :].data_ptr())
            self._registered.clear()
            self._bytes = None


@dataclass(frozen=True, slots=True)
class _Copy:
    kind: Literal["load", "store"]
    part: Tensor
    """On the device, uint8 [bytes]."""
    host: Tensor
    """Its place in the arena, uint8 [bytes]."""
    staged: bool
    """By way of memory of PyTorch's own."""

    def enqueue(self) -> None:
        """On the current stream; staged it is over when this returns."""
        source, target = (self.host, self.part) if self.kind == "load" else (self.part, self.host)
        if self.staged:
            target.copy_(source.to("cpu", copy=True))
        else:
            target.copy_(source, non_blocking=True)


class _Arenas:
    """The arenas met so far, each made a tensor once and let go with its last user."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memories: weakref.WeakKeyDictionary[Arena, _HostMemory] = weakref.WeakKeyDictionary()

    def copies(self, parts: Sequence[Tensor], transfer: Transfer) -> Iterator[_Copy]:
        """The parts, uint8 [bytes] each, follow each other in the transfer's extents.

        Raises ValueError, before the first copy, when parts and extents are not of the same size.
        """
        length, needed = sum(extent.length for extent in transfer.extents), sum(map(len, parts))
        if length != needed:
            raise ValueError(f"the extents hold {length} bytes, what they are for {needed}")
        for extent in transfer.extents:
            if extent.offset < 0 or extent.length <= 0 or extent.offset + extent.length > transfer.arena.size:
                raise ValueError(f"{extent} is not inside the arena of {transfer.arena.size} bytes")
        memory = self._memory(transfer.arena)
        waiting = iter(parts)
        part = next(waiting)
        for extent in transfer.extents:
            for host, staged in memory.slices(extent.offset, extent.length):
                while len(host):
                    if not len(part):
                        part = next(waiting)
                    size = min(len(part), len(host))
                    yield _Copy(transfer.kind, part[:size], host[:size], staged)
                    part, host = part[size:], host[size:]

    def _memory(self, arena: Arena) -> _HostMemory:
        memory = self._memories.get(arena)
        if memory is None:
            memory = self._memories[arena] = _HostMemory(arena.view, self._device)
            # The memory must be unlocked before it is unmapped.
            weakref.finalize(arena, memory.close).atexit = False
        return memory

    def close(self) -> None:
        for memory in self._memories.values():
            memory.close()
        self._memories.clear()


def _parts(transfer: Transfer, pages: KvPages, states: StatePool | None) -> list[Tensor]:
    """What a transfer moves on the device, each uint8 [bytes]: the state, then the page. Raises IndexError or
    ValueError when there is no such thing."""
    parts: list[Tensor] = []
    if transfer.state >= 0:
        if states is None:
            raise ValueError(f"state {transfer.state} of a model without states")
        parts.append(states.slot(transfer.state))
    if transfer.page >= 0 or not parts:
        parts.append(pages.page(transfer.page))
    return parts


class CpuTransfers:
    """Pages in host memory: each copy is over when `start` returns."""

    def __init__(self, pages: KvPages, states: StatePool | None = None) -> None:
        self._pages = pages
        self._states = states
        self._arenas = _Arenas(pages.tensor.device)
        self._done: list[int] = []
        self._failed: list[int] = []

    def start(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            try:
                for copy in self._arenas.copies(_parts(transfer, self._pages, self._states), transfer):
                    copy.enqueue()
                self._done.append(transfer.id)
            except (ValueError, IndexError, RuntimeError) as error:
                _warn(transfer, error)
                self._failed.append(transfer.id)

    def poll(self) -> Progress:
        progress = Progress(tuple(self._done), tuple(self._failed), 0)
        self._done, self._failed = [], []
        return progress

    def close(self) -> None:
        self._arenas.close()


@dataclass(frozen=True, slots=True)
class _Pending:
    transfer: Transfer
    """Keeps the arena mapped while a copy may touch it."""
    failed: bool
    copied: torch.cuda.Event
    """Awaited for failed ones too: some of their pieces may be on their way."""


class CudaTransfers:
    """Copies on side streams, one each way, beside the compute.

    A load waits for all compute launched before it, which may still read what the page held; so does a store, for the
    compute that wrote the page. Compute needs to wait for no copy: the scheduler lets it touch a page only after the
    transfer came back, and it comes back only when its event has happened.
    """

    def __init__(self, pages: KvPages, states: StatePool | None = None) -> None:
        self._pages = pages
        self._states = states
        self._device = pages.tensor.device
        self._arenas = _Arenas(self._device)
        self._streams = {"load": torch.cuda.Stream(self._device), "store": torch.cuda.Stream(self._device)}
        self._pending: dict[str, deque[_Pending]] = {"load": deque(), "store": deque()}

    def start(self, transfers: Iterable[Transfer]) -> None:
        transfers = tuple(transfers)
        if not transfers:
            return
        compute = torch.cuda.current_stream(self._device)
        for stream in self._streams.values():
            stream.wait_stream(compute)
        for transfer in transfers:
            failed = False
            stream = self._streams[transfer.kind]
            with torch.cuda.stream(stream):
                try:
                    for copy in self._arenas.copies(_parts(transfer, self._pages, self._states), transfer):
                        copy.enqueue()
                except (ValueError, IndexError, RuntimeError) as error:
                    _warn(transfer, error)
                    failed = True
            copied = torch.cuda.Event()
            copied.record(stream)
            self._pending[transfer.kind].append(_Pending(transfer, failed, copied))

    def poll(self) -> Progress:
        done: list[int] = []
        failed: list[int] = []
        for queue in self._pending.values():
            while queue and queue[0].copied.query():
                item = queue.popleft()
                (failed if item.failed else done).append(item.transfer.id)
        return Progress(tuple(done), tuple(failed), sum(map(len, self._pending.values())))

    def close(self) -> None:
        """Raises RuntimeError when the device is lost; the arenas are let go all the same."""
        try:
            for stream in self._streams.values():
                stream.synchronize()
        finally:
            for queue in self._pending.values():
                queue.clear()
            self._arenas.close()


def _warn(transfer: Transfer, error: Exception) -> None:
    log.warning("%s of page %d, state %d failed: %s", transfer.kind, transfer.page, transfer.state, error)
