"""A time under load: clients that ask again and again, and what the processes took meanwhile."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from bench.gateway_answers import Timeline
from bench.gateway_client import Exchange, Family, body, stream
from bench.gateway_memory import Memory, sampled
from bench.scripted_stack import Stack

RATE = 100
FAMILIES: tuple[Family, ...] = ("chat", "messages")
FILLING_ANSWERS = 12_800
FILLING_CLIENTS = 16

CONVERSATION = [
    {"role": "user", "content": "Which shapes does the report know?"},
    {"role": "assistant", "content": "Circles and squares. " * 40},
    {"role": "user", "content": "go"},
]
"""Each client asks this in a session of its own."""


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    families: Sequence[Family]
    """Of the clients, in turn."""
    streams: int
    seconds: float
    """That are counted, behind the time in which the clients begin."""


@dataclass(frozen=True, slots=True)
class Load:
    """What happened in a phase."""

    phase: Phase
    exchanges: Sequence[Exchange]
    begin: int
    end: int
    """time.monotonic_ns(): what is between them counts."""
    cpu_seconds: Mapping[str, float]
    """Of user and system time between them, by process."""
    memory: Memory
    """Of the gateway."""

    @property
    def window(self) -> tuple[int, int]:
        return self.begin, self.end


async def loaded(stack: Stack, phase: Phase, answer: Timeline) -> Load:
    """Run `phase`. The clients begin one after the other during the length of one answer, so that at any time some
    are at each place of it. Raises RuntimeError when an answer is not the one that the engine gave."""
    one_answer = len(answer.pieces) / RATE
    begins = time.monotonic() + one_answer
    until = begins + phase.seconds
    exchanges: list[Exchange] = []

    async def client(number: int) -> None:
        family = phase.families[number % len(phase.families)]
        session, request = f"{phase.name}-{number}", body(family, CONVERSATION)
        await asyncio.sleep(one_answer * number / phase.streams)
        while time.monotonic() < until:
            exchange = await stream(stack.url, family, session, request)
            exchanges.append(exchange)
            if exchange.said != answer.said:
                raise RuntimeError(f"{family}: what arrived is not what the engine said: {exchange.said}")

    clients = [asyncio.create_task(client(number)) for number in range(phase.streams)]
    await _sleep_until(begins, clients)
    began, before = time.monotonic_ns(), _cpu(stack)
    async with sampled(stack.gateway.pid) as memory:
        await _sleep_until(until, clients)
        ended, after = time.monotonic_ns(), _cpu(stack)
    await asyncio.gather(*clients)
    cpu = {name: after[name] - before[name] for name in after}
    return Load(phase, exchanges, began, ended, cpu, memory)


async def filled(stack: Stack) -> None:
    """Ask for so many short answers that what grows up to a bound has got there (SQLite's page cache, 2 MiB, takes
    10,000 requests); what grows after that grows for ever."""
    bodies = {family: body(family, CONVERSATION, max_tokens=1) for family in FAMILIES}

    async def client(number: int) -> None:
        family = FAMILIES[number % len(FAMILIES)]
        for _ in range(FILLING_ANSWERS // FILLING_CLIENTS):
            await stream(stack.url, family, f"filling-{number}", bodies[family])

    await asyncio.gather(*(client(number) for number in range(FILLING_CLIENTS)))


async def _sleep_until(moment: float, clients: Sequence["asyncio.Task[Any]"]) -> None:
    """Raises what a client raises meanwhile."""
    done, _ = await asyncio.wait(
        clients, timeout=max(0.0, moment - time.monotonic()), return_when=asyncio.FIRST_EXCEPTION
    )
    for client in done:
        client.result()


def _cpu(stack: Stack) -> dict[str, float]:
    pids = {
        "gateway": stack.gateway.pid,
        "engine": stack.engine.pid,
        "nats": stack.nats.pid,
        "clients": psutil.Process().pid,
    }
    times = {name: psutil.Process(pid).cpu_times() for name, pid in pids.items()}
    return {name: of.user + of.system for name, of in times.items()}
