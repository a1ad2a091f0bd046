"""What `samovar up` knows of one service before it runs."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

Report = Callable[[float | None, str], None]
"""Progress of a start: a fraction of 1 (None: unknown) and what goes on. Reporting the same again is no progress."""

Probe = Callable[[Report], Awaitable[None]]
"""Returns once the service that was started just now is ready. Never raises for a service that is not there yet;
whoever calls it watches the process and the clock, and cancels it."""


@dataclass(frozen=True, slots=True)
class Service:
    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    """The whole environment of the process."""
    ready: Probe
    grace: float
    """Seconds from SIGTERM to SIGKILL."""
    metrics_port: int = 0
    """0: it has none of its own."""
