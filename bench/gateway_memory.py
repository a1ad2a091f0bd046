"""How the memory of a process goes on, from samples of its resident set."""

import asyncio
import bisect
import contextlib
import statistics
import time
from collections.abc import AsyncGenerator
from typing import Any

import psutil

EVERY = 1.0
"""Seconds between samples."""
WARM_UP = 60.0
"""Seconds that are left out of the fit: buffers grow to what the new load takes at most."""
FLAT_MIB = 1.0
"""A fit that grows by no more than this in ten minutes is called flat."""


class Memory:
    """Samples, as they are taken."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._began = time.monotonic()
        self._seconds: list[float] = []
        self._mib: list[float] = []

    def sample(self) -> None:
        self._seconds.append(time.monotonic() - self._began)
        self._mib.append(self._process.memory_info().rss / 2**20)

    def measured(self) -> dict[str, Any]:
        """First and last samples and one of every half minute; where they last long enough to tell, also their fit by
        a line, without the warm-up."""
        every = max(1, round(30 / EVERY))
        measured: dict[str, Any] = {
            "first_mib": round(self._mib[0], 2),
            "last_mib": round(self._mib[-1], 2),
            "seconds": round(self._seconds[-1], 1),
            "mib_each_half_minute": [round(value, 2) for value in self._mib[::every]],
        }
        if self._seconds[-1] >= 2 * WARM_UP:
            warm = bisect.bisect_left(self._seconds, WARM_UP)
            slope, _ = statistics.linear_regression(self._seconds[warm:], self._mib[warm:])
            measured["growth_mib_in_10_minutes_by_fit"] = round(slope * 600, 3)
            measured["flat"] = slope * 600 <= FLAT_MIB
        return measured


@contextlib.asynccontextmanager
async def sampled(pid: int) -> AsyncGenerator[Memory, None]:
    """Sampled while the block runs."""
    memory = Memory(pid)

    async def sample() -> None:
        while True:
            memory.sample()
            await asyncio.sleep(EVERY)

    sampler = asyncio.create_task(sample())
    try:
        yield memory
    finally:
        sampler.cancel()
