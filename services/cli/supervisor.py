"""Starts services in order, keeps them running, stops them in reverse order."""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence

from services.cli.keeper import Keeper, Watcher
from services.cli.service import Service


class Supervisor:
    """All methods belong to one event loop."""

    def __init__(
        self,
        phases: Iterable[Sequence[Service]],
        *,
        start_timeout: float,
        watcher: Watcher,
        changed: Callable[[str, int | None], None],
    ) -> None:
        """The services of a phase start together, once all of the phase before are ready.

        `start_timeout` and `changed` as in `Keeper`.
        """
        self._phases = [[Keeper(s, start_timeout, watcher, changed) for s in phase] for phase in phases]

    async def start(self) -> None:
        """Returns when all services are ready. Raises StartFailed at the first that fails; `drain` is still to be
        called then."""
        for phase in self._phases:
            tasks = [asyncio.create_task(keeper.start()) for keeper in phase]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    async def drain(self) -> None:
        """Stop all, phase by phase from the last, each service within its grace. Those still to come are kept
        running meanwhile, so that open streams can finish."""
        for phase in reversed(self._phases):
            await asyncio.gather(*(keeper.stop() for keeper in phase))

    def kill(self) -> None:
        """SIGKILL all and restart none; a running `drain` ends soon then."""
        for keeper in itertools.chain(*self._phases):
            keeper.kill()
