"""A small real model under core and scheduler, stepped by hand: real pages, real states, real copies to an arena.

Whatever nobody owns is made garbage at once, so that no answer can come out right by what happened to lie there: pages
and slots that become free, the target of a load until its bytes have come, what a failed copy has touched, arena bytes
of objects that the store gave up.
"""

import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch
from msgspec.msgpack import encode
from msgspec.structs import replace

from services.engine.batch import Runner, Transfer
from services.engine.cache.kv_client import KvClient
from services.engine.cache.pages import KvLayout, KvPages
from services.engine.cache.states import StateLayout, StatePool
from services.engine.cache.transfer import PageTransfers, Progress, page_transfers
from services.engine.core import EngineCore
from services.engine.mailbox import CancelRequest, KvAnswer, Message, Sight, StepResult, Submit
from services.engine.model.family import Decoder
from services.engine.model.hybrid_config import HybridConfig
from services.engine.request import Request
from services.engine.runner import ModelRunner
from services.engine.scheduler import Scheduler, SchedulerConfig
from services.engine.sequence import Sequence as Active
from services.engine.step_inputs import Bucket
from services.protocol.events import EngineLoad
from services.protocol.generate import FinishReason, SamplingParams, TokenDelta, Usage
from services.protocol.hashing import BLOCK_TOKENS
from services.protocol.kv import Entry, Extent, Key
from tests.engine.hybrid_models import hybrid_oracle
from tests.engine.preempting import preempt
from tests.engine.tiny_models import decoder, oracle
from tests.fakes import FakeKv, Fate

CPU = torch.device("cpu")
NAN, LARGE = 0xFF, 0x47
"""Bytes of garbage: four of them are a float32 NaN, or 51,015. The reference of attention over captured steps fills
short page tables up with page 0, which has weight 0 and must be finite."""
VOCABULARY = 97
MOST_TOKENS = 900
"""Of a request."""

Kind = Literal["hybrid", "dense"]


@lru_cache
def model(kind: Kind) -> Decoder:
    """Random weights in float32; `hybrid` is Qwen3.5 with delta nets and attention."""
    if kind == "hybrid":
        return decoder(hybrid_oracle("dense"))
    return decoder(oracle("qwen3", max_position_embeddings=2048))


@dataclass(frozen=True, slots=True)
class Size:
    """Of an engine and its store."""

    pages: int = 40
    slots: int = 12
    """Of a hybrid model."""
    chunk: int = 256
    """Tokens of a step."""
    running: int = 8
    interval: int = 8192
    gap: int = 16
    objects: int = 200
    """That the store has room for; 0: there is no store."""
    ahead: bool = False
    """Up to four decodes start before their last tokens are known."""

    @property
    def garbage(self) -> int:
        return LARGE if self.ahead else NAN


class HeldTransfers:
    """Real copies, made when `fate` says so and not before."""

    def __init__(self, inner: PageTransfers, pages: KvPages, states: StatePool | None, garbage: int) -> None:
        self._garbage = garbage
        self.fate: Callable[[Transfer], Fate] = lambda transfer: "done"
        self._inner = inner
        self._pages = pages
        self._states = states
        self._held: dict[int, Transfer] = {}

    def start(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            assert transfer.id not in self._held
            self._held[transfer.id] = transfer
            if transfer.kind == "load":
                self._spoil(transfer)

    def poll(self) -> Progress:
        failed: list[int] = []
        for transfer in list(self._held.values()):
            fate = self.fate(transfer)
            if fate != "wait":
                del self._held[transfer.id]
            if fate == "done":
                self._inner.start([transfer])
            elif fate == "failed":
                failed.append(transfer.id)
                self._spoil(transfer)
        progress = self._inner.poll()
        return Progress(progress.done, (*progress.failed, *failed), len(self._held))

    def close(self) -> None:
        self._inner.close()

    def _spoil(self, transfer: Transfer) -> None:
        if transfer.kind == "store":
            spoil(transfer.arena.view, transfer.extents)
            return
        if transfer.page >= 0:
            self._pages.tensor[transfer.page] = self._garbage
        if transfer.state >= 0:
            assert self._states is not None
            self._states.tensor[transfer.state] = self._garbage


class DirtyKv(FakeKv):
    """The bytes of what it gives up are garbage from then on."""

    full = False
    """It gives nothing up for others."""

    def forget(self, key: Key) -> None:
        entry = self.objects.get(key)
        super().forget(key)
        if entry is not None and key not in self.objects and self.arena is not None:
            spoil(self.arena.view, entry.extents)

    def reserve(self, tag: int, entries: Sequence[Entry], trace: str = "") -> None:
        """While it is not `full`, what finds no room makes some of what was stored first."""
        wanted = sum(entry.key not in self.objects for entry in entries)
        for key in [key for key, entry in self.objects.items() if entry.committed and not self.full]:
            if len(self._free) >= wanted:
                break
            self.forget(key)
        super().reserve(tag, entries, trace)


def spoil(view: memoryview, extents: Iterable[Extent]) -> None:
    for extent in extents:
        view[extent.offset : extent.offset + extent.length] = bytes([NAN]) * extent.length


@dataclass
class Book:
    """What a request was told."""

    request: Request
    prompt: tuple[int, ...]
    told: list[int] = field(default_factory=list)
    cached: int | None = None
    final: TokenDelta | None = None

    @property
    def usage(self) -> Usage:
        assert self.final is not None
        assert self.final.usage is not None
        return self.final.usage

    @property
    def finish(self) -> FinishReason | None:
        return self.final.finish if self.final is not None else None


def as_it_is(runner: Runner) -> Runner:
    return runner


class CacheRig:
    """Keeps the books of what each request was told, and compares what it ends with to a cold run of it alone."""

    def __init__(
        self,
        kind: Kind,
        size: Size,
        wrap: Callable[[Runner], Runner] = as_it_is,
        client: Callable[[Callable[[KvAnswer], None]], KvClient] | None = None,
    ) -> None:
        """`wrap`: what stands between core and runner, such as one that speculates; no token may depend on it.
        `client` makes one of a real store in the place of the fake one, from what delivers its answers."""
        self.kind: Kind = kind
        self.size = size
        decoded = model(kind)
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.pages = KvPages(KvLayout.of(decoded.config, torch.float32), size.pages, CPU)
        self.states: StatePool | None = None
        if isinstance(decoded.config, HybridConfig):
            self.states = StatePool(StateLayout.of(decoded.config, torch.float32), size.slots, CPU)
        state_bytes = self.states.state_bytes if self.states is not None else 0
        self.store = DirtyKv(self.inbox, max(1, size.objects), True, self.pages.page_bytes, state_bytes)
        if size.objects and client is None:
            self.store.connect()
        config = SchedulerConfig(
            fingerprint=kind,
            pages=size.pages,
            max_model_len=MOST_TOKENS,
            max_batch_tokens=size.chunk,
            max_running=size.running,
            page_bytes=self.pages.page_bytes,
            state_slots=size.slots if self.states is not None else 0,
            state_bytes=state_bytes,
            checkpoint_interval=size.interval,
            checkpoint_gap=size.gap,
        )
        self.client: KvClient = self.store if client is None else client(self.inbox.put)
        self.scheduler = Scheduler(config, self.client if size.objects else None)
        self.transfers = HeldTransfers(page_transfers(self.pages, self.states), self.pages, self.states, size.garbage)
        runner = ModelRunner(decoded, self.pages, self.transfers, CPU, self.states)
        if size.ahead:
            runner.decodes.capture([Bucket(4, MOST_TOKENS)], 600.0, lambda share, what: None)
        self.core = EngineCore(self.scheduler, wrap(runner), self.inbox, self.take)
        self.books: dict[str, Book] = {}
        self.on_device: set[bytes] = set()
        self.load = EngineLoad()
        self.result: StepResult | None = None
        self.spoil()

    @property
    def most(self) -> int:
        """Tokens of a request, prompt and answer."""
        return min(MOST_TOKENS, self.size.pages * BLOCK_TOKENS)

    def submit(self, request: Request) -> None:
        assert request.request_id not in self.books
        book = self.books[request.request_id] = Book(request, tuple(request.prompt), list(request.output))
        self.inbox.put(Submit(book.request))

    def cancel(self, name: str) -> None:
        self.inbox.put(CancelRequest(name))

    def active(self) -> list[Active]:
        """Those that run, the oldest first."""
        return list(self.scheduler._running)

    def preempt(self, sequence: Active) -> None:
        preempt(self.scheduler, sequence)
        self.spoil()

    def push_out(self) -> None:
        """Take all that can be taken, and give it back as nobody's."""
        pool, checkpoints = self.scheduler._pool, self.scheduler._checkpoints
        pool.release(pool.allocate(pool.available))
        slots = [checkpoints.take() for _ in range(checkpoints.available)]
        for slot in slots:
            assert slot is not None
            checkpoints.give_back(slot)
        self.spoil()

    def step(self) -> bool:
        """What the core's loop does until it waits again. False: it waits, and nothing but a message can wake it."""
        if self.inbox.empty():
            if self.core.resume_at is None:
                return False
            time.sleep(max(0.0, self.core.resume_at - time.monotonic()))
        while not self.inbox.empty():
            self.core.handle(self.inbox.get())
        self.core.step()
        self.spoil()
        self.scheduler.check_integrity()
        return True

    def spoil(self) -> None:
        """What is free means nothing."""
        self.pages.tensor[self.scheduler._pool._free] = self.size.garbage
        if self.states is not None:
            self.states.tensor[self.scheduler._checkpoints._free] = self.size.garbage

    def take(self, result: StepResult) -> None:
        self.result, self.load = result, result.load
        assert set(result.removed) <= self.on_device
        assert not set(result.stored) & self.on_device
        self.on_device = (self.on_device | set(result.stored)) - set(result.removed)
        if result.sight is not None:
            self.check_sight(result.sight)
        for _, delta in result.deltas:
            name = delta.request_id
            book = self.books[name]
            assert book.final is None, f"{name} goes on after its final delta"
            assert delta.offset == len(book.told), f"{name} has a gap"
            book.told += delta.tokens
            if delta.finish is not None:
                book.final = delta
                self.check(name)
            elif delta.offset == book.request.resumed:
                book.cached = delta.cached
        ended = {delta.request_id for _, delta in result.deltas if delta.finish is not None}
        assert {timeline.request_id for timeline in result.finished} == ended

    def check_sight(self, sight: Sight) -> None:
        """That what is told of the contexts is what the books say, parents first."""
        known: set[bytes] = set()
        for run in sight.runs:
            assert run.parent in known or not run.parent
            assert 0 <= run.held <= run.device <= run.tokens
            assert all(run.start <= position <= run.start + run.tokens + 63 for position, _ in run.checkpoints)
            known.add(run.name)
        assert len(known) == len(sight.runs)
        assert sum(run.device for run in sight.runs) == BLOCK_TOKENS * len(self.on_device)

    def check(self, name: str) -> None:
        """That an answer which ended is the one of a cold run, whole unless it was called off."""
        book = self.books[name]
        request, told, usage = book.request, tuple(book.told), book.usage
        whole = cold(self.kind, book.prompt, request.sampling, self.most)
        assert told == whole[: len(told)], f"{name} is not what a cold run says: {told} instead of {whole}"
        assert book.finish in ("stop", "length", "cancel"), book.final
        assert book.finish == "cancel" or len(told) == max(len(whole), request.resumed), f"{name} ends early"
        assert request.prompt == list(book.prompt), "the prompt was changed"
        assert (usage.prompt_tokens, usage.output_tokens) == (len(book.prompt), len(told))
        assert book.cached in (None, usage.cached_tokens), "a client was told another number"
        if len(told) > request.resumed:
            assert usage.cached_tokens + usage.computed_tokens >= len(book.prompt)
            if not usage.preemptions:
                assert usage.cached_tokens + usage.computed_tokens == len(book.prompt)

    def run(self, steps: int = 20_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(steps):
            if not self.step():
                return
        raise AssertionError(f"not done after {steps} steps")

    def settle(self) -> None:
        """Let everything end, and check that nothing is left over."""
        self.transfers.fate = lambda transfer: "done"
        self.store.automatic = True
        for _ in range(20_000):
            while self.store.calls:
                self.store.answer()
            if not self.step():
                break
        unfinished = [name for name, book in self.books.items() if book.final is None]
        assert not unfinished, f"never finished: {unfinished}"
        assert self.scheduler.idle, "something waits for ever"
        assert (self.load.running, self.load.waiting, self.load.pending_prefill_tokens) == (0, 0, 0)
        assert self.load.pages_free == self.size.pages, "pages leaked"
        assert self.scheduler._checkpoints.held == 0, "slots leaked"
        self.store.check_idle()
        assert not self.pages.tensor[self.pages.blank].any(), "the blank page was written to"
        self.scheduler.snapshot()
        self.core.step()
        assert self.result is not None
        assert set(self.result.snapshot or ()) == self.on_device


@lru_cache
def _alone(kind: Kind) -> CacheRig:
    return CacheRig(kind, Size(pages=MOST_TOKENS // BLOCK_TOKENS + 2, slots=4, chunk=4096, objects=0))


_told: dict[tuple[Kind, tuple[int, ...], bytes], tuple[int, ...]] = {}


def cold(kind: Kind, prompt: tuple[int, ...], sampling: SamplingParams, most: int) -> tuple[int, ...]:
    """What a request gets that finds nothing, alone on its engine, in one chunk. `most`: tokens with the prompt."""
    limited = replace(sampling, max_tokens=min(sampling.max_tokens, most - len(prompt)))
    key = (kind, prompt, encode(limited))
    if key not in _told:
        rig = _alone(kind)
        # Of a salt of its own, so that it shares nothing with those before it.
        name = f"cold{len(_told)}"
        told: list[int] = []
        rig.core._deliver = lambda result: told.extend(token for _, delta in result.deltas for token in delta.tokens)
        rig.inbox.put(Submit(Request(name, "gateway", list(prompt), [], 0, limited, cache_salt=name)))
        rig.run()
        _told[key] = tuple(told)
    return _told[key]
