"""Stand-ins for the engine's device and its kvstore: small, strict, and under the test's control.

`FakeRunner` really keeps KV in pages and recurrent states in slots, and checks on every read that they hold what they
must: a wrong page table, a page freed too early, a state of another position or an unfinished restore fails loudly.
`FakeKv` answers when the test says so.
"""

import os
import queue
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal
from zlib import crc32

from services.engine.batch import Copy, ModelOutput, Row, Sampled, ScheduledBatch, Transfer
from services.engine.cache.arena import Arena
from services.engine.cache.kv_client import Goal
from services.engine.mailbox import KvConnected, KvLeased, KvReserved, Message
from services.protocol.hashing import BLOCK_TOKENS
from services.protocol.kv import Entry, Extent, Key

VOCABULARY = 251
PAGE_BYTES = 8 * BLOCK_TOKENS
STATE_BYTES = 16
_UNIT = 4096
_POISON = -1
_NO_STATE = array("q", [_POISON, _POISON])
"""A slot holds a position and the fold of all tokens before it."""


def state_before(salt: str) -> int:
    """What the KV of a sequence's position -1 would be."""
    return crc32(salt.encode())


def state_after(state: int, token: int) -> int:
    """The KV of a position whose token is `token`, behind a position whose KV is `state`: names the whole prefix."""
    return hash((state, token)) >> 1  # hashes of ints are the same in every process; never _POISON


def next_token(state: int) -> int:
    return state % VOCABULARY


def continuation(prompt: Sequence[int], count: int, salt: str = "") -> list[int]:
    """What the fake model says behind a prompt: the oracle, without pages or batches."""
    state = state_before(salt)
    for token in prompt:
        state = state_after(state, token)
    output: list[int] = []
    for _ in range(count):
        output.append(next_token(state))
        state = state_after(state, output[-1])
    return output


@dataclass
class Context:
    """All that a request's rows may ever show."""

    root: int
    tokens: list[int]
    states: "array[int]"

    @classmethod
    def of(cls, prompt: Sequence[int], salt: str) -> "Context":
        state = state_before(salt)
        context = cls(state, [], array("q"))
        for token in prompt:
            state = state_after(state, token)
            context.tokens.append(token)
            context.states.append(state)
        return context

    def grow(self, length: int) -> None:
        while len(self.tokens) < length:
            token = next_token(self.states[-1])
            self.tokens.append(token)
            self.states.append(state_after(self.states[-1], token))


Fate = Literal["done", "failed", "wait"]


def _always_one(request_id: str, position: int) -> int:
    return 1


def _at_once(transfer: Transfer) -> Fate:
    return "done"


@dataclass
class FakeRunner:
    """Computes `state_after` into pages. Call `expect` with each request before it runs.

    With `slots` it is a recurrent model: what it computes comes from the content of the rows' slots and from nowhere
    else, and it samples from there.
    """

    pages: int
    slots: int = 0
    burst: Callable[[str, int], int] = _always_one
    """(request id, position) -> how many tokens a sampled row gives."""
    fate: Callable[[Transfer], Fate] = _at_once
    """Asked for every transfer under way, in each step. Bytes move when it says `done`, not before."""
    fail_at: int = 0
    """The step in which the device breaks."""
    before_step: Callable[[ScheduledBatch], None] | None = None
    closed: bool = False
    prompt_tokens_run: dict[str, int] = field(default_factory=dict)
    most_tokens: int = 0
    """Of any batch."""
    batches: list[ScheduledBatch] = field(default_factory=list)
    keep_batches: bool = False

    def __post_init__(self) -> None:
        self._memory = [array("q", [_POISON]) * BLOCK_TOKENS for _ in range(self.pages)]
        self._states = [_NO_STATE] * self.slots
        self._contexts: dict[str, Context] = {}
        self._prompt_lengths: dict[str, int] = {}
        self._under_way: dict[int, Transfer] = {}

    def expect(self, request_id: str, prompt: Sequence[int], salt: str = "") -> None:
        self._contexts[request_id] = Context.of(prompt, salt)
        self._prompt_lengths[request_id] = len(prompt)

    def close(self) -> None:
        self.closed = True

    @property
    def under_way(self) -> tuple[Transfer, ...]:
        return tuple(self._under_way.values())

    def run(self, batch: ScheduledBatch) -> ModelOutput:
        if self.before_step is not None:
            self.before_step(batch)
        if self.keep_batches:
            self.batches.append(batch)
        if batch.step == self.fail_at:
            raise RuntimeError("the device fell off the bus")
        assert len({row.request_id for row in batch.rows}) == len(batch.rows), "a request has two rows"
        self.most_tokens = max(self.most_tokens, sum(len(row.tokens) for row in batch.rows))
        for transfer in batch.transfers:
            self._begin(transfer)
        for copy in batch.before:
            self._duplicate(copy)
        states = [row.state for row in batch.rows if row.state >= 0]
        assert len(set(states)) == len(states), "two rows share a state"
        # All writes come before all reads, as in a layer of a real model: rows may not share what they write.
        for row in batch.rows:
            self._write(row)
        sampled = {row.request_id: self._read(row) for row in batch.rows}
        for copy in batch.after:
            self._duplicate(copy)
        done, failed = self._progress()
        return ModelOutput(
            step=batch.step,
            sampled={name: tokens for name, tokens in sampled.items() if tokens is not None},
            transfers_done=done,
            transfers_failed=failed,
            transfers_pending=len(self._under_way),
        )

    def _begin(self, transfer: Transfer) -> None:
        assert transfer.id not in self._under_way
        assert transfer.state >= 0 or transfer.page >= 0
        size = (PAGE_BYTES if transfer.page >= 0 else 0) + (STATE_BYTES if transfer.state >= 0 else 0)
        assert sum(extent.length for extent in transfer.extents) == size
        for other in self._under_way.values():
            if other.kind == transfer.kind == "store":
                continue
            assert transfer.page < 0 or other.page != transfer.page, "two copies race for a page"
            assert transfer.state < 0 or other.state != transfer.state, "two copies race for a state"
        self._under_way[transfer.id] = transfer
        if transfer.kind == "load" and transfer.page >= 0:
            self._memory[transfer.page] = array("q", [_POISON]) * BLOCK_TOKENS
        if transfer.kind == "load" and transfer.state >= 0:
            self._states[transfer.state] = _NO_STATE

    def _progress(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        done: list[int] = []
        failed: list[int] = []
        for transfer in list(self._under_way.values()):
            fate = self.fate(transfer)
            if fate == "wait":
                continue
            del self._under_way[transfer.id]
            if fate == "done":
                self._copy(transfer)
            (done if fate == "done" else failed).append(transfer.id)
        return tuple(done), tuple(failed)

    def _copy(self, transfer: Transfer) -> None:
        if transfer.kind == "store":
            state = self._states[transfer.state].tobytes() if transfer.state >= 0 else b""
            data, at = state + (self._memory[transfer.page].tobytes() if transfer.page >= 0 else b""), 0
            for extent in transfer.extents:
                transfer.arena.view[extent.offset : extent.offset + extent.length] = data[at : at + extent.length]
                at += extent.length
        else:
            data = b"".join(bytes(transfer.arena.view[e.offset : e.offset + e.length]) for e in transfer.extents)
            if transfer.state >= 0:
                self._states[transfer.state] = array("q", data[:STATE_BYTES])
                data = data[STATE_BYTES:]
            if transfer.page >= 0:
                self._memory[transfer.page] = array("q", data)

    def _duplicate(self, copy: Copy) -> None:
        assert copy.source != copy.target
        for transfer in self._under_way.values():
            used = transfer.page if copy.kind == "page" else transfer.state
            assert used != copy.target, "copies onto what is being transferred"
            assert used != copy.source or transfer.kind == "store", "copies what is being loaded"
        memory = self._memory if copy.kind == "page" else self._states
        memory[copy.target] = memory[copy.source][:]

    def _state(self, row: Row, context: Context) -> int:
        """The state behind the position before the row's first one."""
        if not self.slots:
            assert row.state == -1
            return context.states[row.start - 1] if row.start else context.root
        assert all(transfer.state != row.state for transfer in self._under_way.values()), "a state is being copied"
        if row.start == 0:
            return context.root
        position, state = self._states[row.state]
        assert position == row.start, f"the slot of {row.request_id} stands at {position}, the row at {row.start}"
        return state

    def _write(self, row: Row) -> None:
        context, end = self._contexts[row.request_id], row.start + len(row.tokens)
        assert row.tokens or (self.slots and row.sample is not None), "an empty row"
        context.grow(end)
        assert list(row.tokens) == context.tokens[row.start : end], "not the tokens of this request"
        assert len(row.pages) * BLOCK_TOKENS >= end, "the page table is too short"
        assert len(set(row.pages)) == len(row.pages), "a page stands twice in a table"
        assert row.start <= row.write_from <= end
        state = self._state(row, context)
        for position in range(row.start, end):
            state = state_after(state, row.tokens[position - row.start])
            if position < row.write_from:
                continue
            page = row.pages[position // BLOCK_TOKENS]
            assert all(t.page != page for t in self._under_way.values()), "writes to a page that is being copied"
            self._memory[page][position % BLOCK_TOKENS] = state
        if self.slots:
            self._states[row.state] = array("q", [end, state])

    def _read(self, row: Row) -> Sampled | None:
        context, end = self._contexts[row.request_id], row.start + len(row.tokens)
        loading = {t.page for t in self._under_way.values() if t.kind == "load"}
        for index in range(-(-end // BLOCK_TOKENS)):
            page, first = row.pages[index], index * BLOCK_TOKENS
            assert page not in loading, "reads a page that is being loaded"
            count = min(BLOCK_TOKENS, end - first)
            assert self._memory[page][:count] == context.states[first : first + count], (
                f"{row.request_id}: page {page} does not hold positions [{first}, {first + count})"
            )
        length = self._prompt_lengths[row.request_id]
        run = self.prompt_tokens_run.get(row.request_id, 0)
        self.prompt_tokens_run[row.request_id] = run + max(0, min(end, length) - row.start)
        if row.sample is None:
            return None
        assert [*row.sample.prompt, *row.sample.output] == context.tokens[:end], "the sampler sees another context"
        assert len(row.sample.prompt) == length
        count = self.burst(row.request_id, end)
        state = self._states[row.state][1] if self.slots else context.states[end - 1]
        tokens: list[int] = []
        while len(tokens) < count:
            tokens.append(next_token(state))
            state = state_after(state, tokens[-1])
        context.grow(end + count)
        assert tokens == context.tokens[end : end + count], "not what a cold run says"
        return Sampled(tuple(tokens))


@dataclass
class LeaseCall:
    tag: int
    keys: tuple[Key, ...]


@dataclass
class FindCall:
    tag: int
    keys: tuple[Key, ...]
    goals: tuple[Goal, ...]


@dataclass
class ReserveCall:
    tag: int
    entries: tuple[Entry, ...]


@dataclass
class _Object:
    extents: tuple[Extent, ...]
    committed: bool = False
    leases: int = 0


class FakeKv:
    """A KvClient and its store in one. Calls wait in `calls` until the test has them answered into `inbox`."""

    def __init__(
        self,
        inbox: "queue.SimpleQueue[Message]",
        capacity: int = 1 << 12,
        automatic: bool = False,
        page_bytes: int = PAGE_BYTES,
        state_bytes: int = STATE_BYTES,
    ) -> None:
        """`capacity` in objects; `automatic`: every call is answered when it is made."""
        self._block_sizes = (page_bytes,)
        self._state_sizes = (state_bytes, state_bytes + page_bytes)
        self._room = -(-(state_bytes + page_bytes) // _UNIT) * _UNIT
        self.inbox = inbox
        self.capacity = capacity
        self.automatic = automatic
        self.arena: Arena | None = None
        self.calls: list[LeaseCall | FindCall | ReserveCall] = []
        self.leases: dict[int, tuple[Key, ...]] = {}
        self.objects: dict[Key, _Object] = {}
        self.refused = 0
        self.chances: dict[Key, float] = {}
        self._free: list[int] = []
        self._next_lease = 1
        self._rng = random.Random(1)

    # The client.

    def lease(self, tag: int, keys: Sequence[Key], trace: str = "") -> None:
        assert keys
        self._call(LeaseCall(tag, tuple(keys)))

    def find(self, tag: int, keys: Sequence[Key], goals: Sequence[Goal], trace: str = "") -> None:
        assert goals
        assert all(0 <= goal.keys <= len(keys) and (goal.keys or goal.key) for goal in goals)
        self._call(FindCall(tag, tuple(keys), tuple(goals)))

    def reserve(self, tag: int, entries: Sequence[Entry], trace: str = "") -> None:
        assert entries
        for entry in entries:
            assert entry.length in (self._state_sizes if b"/state/" in entry.key else self._block_sizes)
            assert entry.cost > 0
        self._call(ReserveCall(tag, tuple(entries)))

    def commit(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if (entry := self.objects.get(key)) is not None:
                assert not entry.committed, "committed twice"
                entry.committed = True

    def release(self, lease: int) -> None:
        # A lease of an earlier connection is void, and its number is not used again.
        assert 0 < lease < self._next_lease
        for key in self.leases.pop(lease, ()):
            self.objects[key].leases -= 1

    def drop(self, keys: Sequence[Key]) -> None:
        assert keys, "that would drop everything"
        for key in keys:
            self.forget(key)

    def weigh(self, keys: Sequence[Key], chance: float) -> None:
        assert keys
        assert 0 < chance <= 1
        self.chances.update(dict.fromkeys(keys, chance))

    # The test's side.

    def connect(self) -> None:
        """A new, empty store is there."""
        assert self.arena is None
        size = self.capacity * self._room
        descriptor = os.memfd_create("fake-arena")
        os.ftruncate(descriptor, size)
        self.arena = Arena(descriptor, size)
        self._free = [index * self._room for index in range(self.capacity)]
        self.inbox.put(KvConnected(self.arena))

    def disconnect(self) -> None:
        """The connection is lost: what the store held is, calls under way come back empty, and the arena's bytes serve
        another."""
        assert self.arena is not None
        self.arena.view[:] = b"\xaa" * self.arena.size
        self.arena = None
        self.objects.clear()
        self.leases.clear()
        while self.calls:
            self.answer(empty=True)

    def answer(self, index: int = 0, empty: bool = False) -> None:
        """Answer a waiting call, `empty` as if the store were away."""
        call = self.calls.pop(index)
        if isinstance(call, LeaseCall):
            self.inbox.put(self._leased(call) if not empty else KvLeased(call.tag, None, 0, ()))
        elif isinstance(call, FindCall):
            self.inbox.put(self._found(call) if not empty else KvLeased(call.tag, None, 0, ()))
        else:
            nothing = KvReserved(call.tag, None, (None,) * len(call.entries))
            self.inbox.put(self._reserved(call) if not empty else nothing)

    def forget(self, key: Key) -> None:
        """Evict an object, or give up a reservation."""
        entry = self.objects.get(key)
        if entry is not None and entry.leases == 0:
            del self.objects[key]
            self._free.append(min(extent.offset for extent in entry.extents))

    @property
    def committed(self) -> set[Key]:
        return {key for key, entry in self.objects.items() if entry.committed}

    def check_idle(self) -> None:
        assert not self.calls
        assert not self.leases, "a lease was never given back"
        assert len(self.committed) == len(self.objects), "a reservation was neither committed nor given up"

    def _found(self, call: FindCall) -> KvLeased:
        reach = next((index for index, key in enumerate(call.keys) if key not in self.committed), len(call.keys))
        for index, goal in enumerate(call.goals):
            if goal.keys <= reach and (not goal.key or goal.key in self.committed):
                keys = call.keys[: goal.keys] + ((goal.key,) if goal.key else ())
                return replace(self._leased(LeaseCall(call.tag, keys)), goal=index)
        return KvLeased(call.tag, self.arena, 0, ())

    def _call(self, call: LeaseCall | FindCall | ReserveCall) -> None:
        self.calls.append(call)
        if self.arena is None or self.automatic:
            self.answer(len(self.calls) - 1, empty=self.arena is None)

    def _leased(self, call: LeaseCall) -> KvLeased:
        hits: list[Key] = []
        for key in call.keys:
            entry = self.objects.get(key)
            if entry is None or not entry.committed:
                break
            hits.append(key)
        if not hits:
            return KvLeased(call.tag, self.arena, 0, ())
        lease = self._next_lease
        self._next_lease += 1
        self.leases[lease] = tuple(hits)
        for key in hits:
            self.objects[key].leases += 1
        return KvLeased(call.tag, self.arena, lease, tuple(self.objects[key].extents for key in hits))

    def _reserved(self, call: ReserveCall) -> KvReserved:
        extents: list[tuple[Extent, ...] | None] = []
        full = 0
        for entry in call.entries:
            if entry.key in self.objects:
                extents.append(None)
            elif not self._free:
                self.refused += 1
                full += 1
                extents.append(None)
            else:
                extents.append(self._place(self._free.pop(), entry.length))
                self.objects[entry.key] = _Object(extents[-1] or ())
        return KvReserved(call.tag, self.arena, tuple(extents), full)

    def _place(self, offset: int, length: int) -> tuple[Extent, ...]:
        """One extent, or two in the wrong order."""
        if self._rng.random() < 0.5:
            return (Extent(offset, length),)
        half = length // 2
        return Extent(offset + length - half, half), Extent(offset, length - half)
