"""`python -m bench soak [--minutes 10]`: the real stack under a random load of agents, with processes killed at times.

NATS, kvstore, one engine with the small model in float32, gateway; pools so small that nearly everything moves. Every
answer at temperature 0 is compared with the first one to the same prompt. At the end nothing may be held: no page, no
state, no lease, no reservation; and no process may have grown while nothing was killed. Ends with 1 if anything of this
is not so.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.soak_agents import Agent, Record
from bench.soak_stack import SERVICES, Stack, running

MODEL = Path(__file__).parents[1] / "models" / "samovar-tiny"
OPTIONS = ("--model", str(MODEL), "--device", "cpu", "--engines", "1", "--kv-pages", "56", "--kv-size", "24MiB")
SETTINGS = {
    "SAMOVAR_DTYPE": "float32",
    "SAMOVAR_MAX_MODEL_LEN": "3072",
    "SAMOVAR_STATES": "14",
    "SAMOVAR_MAX_RUNNING": "5",
    "SAMOVAR_MAX_BATCH_TOKENS": "192",
    "SAMOVAR_THREADS": "1",
}
AGENTS = 6
KILLS = (("engine", 0.12), ("kvstore", 0.22), ("engine", 0.34), ("kvstore", 0.42))
"""Service and share of the time. Behind the last one nothing is disturbed, so that growth would show."""
CALM = 0.5
"""Share of the time from which on memory is looked at."""
GROWTH = 1.08
"""Of private memory, last third of the calm time over its first third, at most."""
WARM = 240
"""Seconds of a run from which on growth is judged: before, what an engine needs for the first time is still in it."""


@dataclass(frozen=True, slots=True)
class Sample:
    share: float
    """Of the time."""
    sizes: dict[str, tuple[int, int]]
    """(process id, bytes) by service."""


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench soak")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--home", type=Path, help="where logs and databases are kept; by default they go")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        home = options.home or Path(folder)
        home.mkdir(parents=True, exist_ok=True)
        with running(home, *OPTIONS, **SETTINGS) as stack:
            wrong = asyncio.run(_soak(stack, options.minutes * 60, options.seed))
    if wrong:
        sys.exit(1)


async def _soak(stack: Stack, seconds: float, seed: int) -> bool:
    record, samples, stop = Record(), list[Sample](), asyncio.Event()
    async with httpx.AsyncClient(base_url=stack.url, timeout=180) as client:
        agents = [Agent(client, record, seed * 1000 + index) for index in range(AGENTS)]
        running_agents = [asyncio.create_task(agent.run(stop)) for agent in agents]
        watch = asyncio.create_task(_watch(stack, seconds, record, samples))
        # An agent ends before its time only by an error.
        await asyncio.wait([watch, *running_agents], return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        watch.cancel()
        ended = await asyncio.gather(watch, *running_agents, return_exceptions=True)
    record.wrong += [f"gave up: {error!r}" for error in ended if isinstance(error, Exception)]
    held = await _held(stack)
    record.wrong += [f"{what} at the end: {count:g}" for what, count in held.items() if count]
    growth = {service: _growth(samples, service) for service in SERVICES}
    if seconds >= WARM:
        record.wrong += [f"{service} has grown to {ratio:.2f}" for service, ratio in growth.items() if ratio > GROWTH]
    _print(record, held, growth, samples)
    return bool(record.wrong)


async def _watch(stack: Stack, seconds: float, record: Record, samples: list[Sample]) -> None:
    began, kills = time.monotonic(), list(KILLS)
    while (share := (time.monotonic() - began) / seconds) < 1:
        if kills and share >= kills[0][1]:
            service, _ = kills.pop(0)
            stack.kill(service)
            record.counts[f"{service} killed"] += 1
            print(f"{share:4.0%} killed the {service}; {record.counts['answers']} answers so far", flush=True)
        samples.append(Sample(share, stack.private_bytes()))
        await asyncio.sleep(min(2.0, seconds / 100))


async def _held(stack: Stack) -> dict[str, float]:
    """What is still held when all have ended; it may take a moment until the last one that left is gone."""
    held: dict[str, float] = {}
    for _ in range(60):
        engine, store = stack.metrics("engine"), stack.stat()
        prefix = "samovar_engine_"
        held = {
            "requests running": engine[f"{prefix}requests_running"],
            "requests waiting": engine[f"{prefix}requests_waiting"],
            "pages held": engine[f"{prefix}pages_total"] - engine[f"{prefix}pages_free"],
            "states held": engine.get(f'{prefix}states{{owner="request"}}', 0.0),
            "objects leased": store.leased,
            "objects reserved": store.reserved,
        }
        if not any(held.values()):
            break
        await asyncio.sleep(0.25)
    return held


def _growth(samples: Sequence[Sample], service: str) -> float:
    """Mean of the last third of the calm time over that of the first; 1 where there is too little to say."""
    last = [sample.sizes[service] for sample in samples if sample.share >= CALM and service in sample.sizes]
    sizes = [size for process, size in last if process == last[-1][0]]
    third = len(sizes) // 3
    if third < 3:
        return 1.0
    return (sum(sizes[-third:]) / third) / (sum(sizes[:third]) / third)


def _print(record: Record, held: dict[str, float], growth: dict[str, float], samples: Sequence[Sample]) -> None:
    rows = [(name, f"{count:,}") for name, count in sorted(record.counts.items())]
    rows += [(what, f"{count:g}") for what, count in held.items()]
    for service, ratio in growth.items():
        sizes = [sample.sizes[service][1] / 2**20 for sample in samples if service in sample.sizes]
        if sizes:
            rows.append((f"{service} memory", f"{sizes[0]:.0f} .. {sizes[-1]:.0f} MiB, calm growth {ratio:.3f}"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    for wrong in record.wrong:
        print(f"WRONG: {wrong}")
    print("wrong" if record.wrong else "right: no answer differed, and nothing is held")
