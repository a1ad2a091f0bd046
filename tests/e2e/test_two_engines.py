"""Two engines on one real kvstore process: what one has read the other finds, and nothing that is half there."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from services.engine.batch import Transfer
from services.engine.cache.kvstore_client import KvClient
from services.engine.mailbox import KvAnswer
from services.engine.request import Request
from services.protocol import kv
from services.protocol.generate import SamplingParams, Usage
from services.protocol.hashing import BLOCK_TOKENS
from tests.e2e.stack import wait_until
from tests.engine.cache_rig import CacheRig, Kind, Size, spoil
from tests.engine.tiny_models import random_ids
from tests.fakes import Fate
from tests.kvstore.process import RawClient, running

SECONDS = 30
SIZE = Size(pages=20, slots=8)
PROMPT = random_ids(300, 1)
KILLED_AFTER = 2
"""Blocks."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextmanager
def engine(path: Path, kind: Kind, name: str) -> Generator[CacheRig]:
    """Connected."""
    clients: list[KvClient] = []

    def client(deliver: Callable[[KvAnswer], None]) -> KvClient:
        clients.append(KvClient(str(path), name, kind, deliver))
        return clients[0]

    rig = CacheRig(kind, SIZE, client=client)
    clients[0].start()
    with closing(clients[0]):
        until(rig, lambda: clients[0].connected)
        yield rig


def until(rig: CacheRig, done: Callable[[], bool]) -> None:
    """Step, and wait for the store's answers."""
    while not done():
        if not rig.step():
            rig.inbox.put(rig.inbox.get(timeout=SECONDS))


def submit(rig: CacheRig, name: str, prompt: list[int], most: int, *hints: int) -> None:
    sampling = SamplingParams(max_tokens=most, temperature=0)
    rig.submit(Request(name, "gateway", list(prompt), [], 0, sampling, hints=hints))


def serve(rig: CacheRig, name: str, prompt: list[int], most: int, *hints: int) -> Usage:
    """Until it is answered, as a cold run would (the rig sees to that), and all of it has been written through. An
    engine that has never seen a context looks for states of it at the `hints`."""
    submit(rig, name, prompt, most, *hints)
    until(rig, lambda: rig.books[name].final is not None and rig.scheduler.idle)
    return rig.books[name].usage


def stat(path: Path, kind: Kind) -> kv.StatReply:
    with RawClient(path, fingerprint=kind) as client:
        return client.call(kv.Stat)


@pytest.mark.parametrize("kind", ["hybrid", "dense"])
def test_what_one_has_read_the_other_finds(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    with running(path), engine(path, kind, "first") as first, engine(path, kind, "second") as second:
        serve(first, "cold", PROMPT, 5)
        known = len(PROMPT) if kind == "hybrid" else len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS
        turn = PROMPT + first.books["cold"].told + random_ids(70, 2)
        usage = serve(second, "next turn", turn, 60, len(PROMPT))
        assert usage.cached_device == 0
        assert usage.cached_host >= known
        assert usage.cached_host + usage.computed_tokens == len(turn)
        # And back: the first one has the beginning itself, and finds what the second has added.
        usage = serve(first, "turn after", turn + second.books["next turn"].told, 5, len(PROMPT), len(turn))
        assert usage.cached_device > 0
        assert usage.cached_host > 0
        assert usage.computed_tokens <= BLOCK_TOKENS
        # The same new prompt at both at once: each object is written by one of them.
        for rig in (first, second):
            submit(rig, "both", random_ids(400, 3), 5)
        until(first, lambda: second.step() or (first.books["both"].final is not None and first.scheduler.idle))
        until(second, lambda: second.books["both"].final is not None and second.scheduler.idle)
        left = stat(path, kind)
        assert (left.leased, left.reserved) == (0, 0)


def dies_amid_a_store(path: str) -> None:
    """A process of its own that never ends: some blocks are copied, the next one half, and the others not at all."""
    copied: set[int] = set()

    def fate(transfer: Transfer) -> Fate:
        if len(copied) < KILLED_AFTER:
            copied.add(transfer.id)
            return "done"
        if len(copied) == KILLED_AFTER:
            copied.add(transfer.id)
            spoil(transfer.arena.view, [kv.Extent(transfer.extents[0].offset, transfer.extents[0].length // 2)])
            print("half written", flush=True)
        return "wait"

    with engine(Path(path), "dense", "dies") as rig:
        rig.transfers.fate = fate
        serve(rig, "cold", PROMPT, 5)


def test_what_a_killed_one_was_writing_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    program = f"from tests.e2e.test_two_engines import dies_amid_a_store; dies_amid_a_store({str(path)!r})"
    with running(path):
        dying = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        try:
            assert dying.stdout is not None
            assert dying.stdout.readline() == "half written\n"
            wait_until("the others are committed", lambda: stat(path, "dense").objects == KILLED_AFTER)
            assert stat(path, "dense").reserved >= 1
        finally:
            os.kill(dying.pid, signal.SIGKILL)
            dying.communicate()
        with engine(path, "dense", "second") as second, engine(path, "dense", "third") as third:
            usage = serve(second, "again", PROMPT, 5)
            assert usage.cached_host == KILLED_AFTER * BLOCK_TOKENS
            # What it could not finish the second one has written.
            usage = serve(third, "once more", PROMPT, 5)
            assert usage.cached_host == len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS
        # The bytes that the dead one might still have written to stay out of use for a moment, as if leased.
        assert stat(path, "dense").reserved == 0
