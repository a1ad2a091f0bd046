"""Small programs that stand in for services, and a watcher that remembers."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.cli.keeper import StartFailed
from services.cli.log_line import LogLine
from services.cli.service import Probe, Service

PRELUDE = """
import os, signal, sys, time
from pathlib import Path

def on_term(do):
    def handler(*_):
        do()
        sys.exit(0)
    signal.signal(signal.SIGTERM, handler)

def say(text):
    print(f"2026-11-30 12:00:00,000 INFO    standin x: {text}", flush=True)
"""
WAIT = "\nwhile True: signal.pause()\n"


class Watched:
    """A `Watcher` that keeps all it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.lines: list[LogLine] = []
        self.readied: list[str] = []
        self.progress: list[tuple[str, float | None, str]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def log(self, line: LogLine) -> None:
        self.lines.append(line)

    def failed(self, failure: StartFailed) -> None:
        self.said.append(str(failure))

    def starting(self, service: str, fraction: float | None, detail: str) -> None:
        self.progress.append((service, fraction, detail))

    def ready(self, service: str, seconds: float) -> None:
        self.readied.append(service)


def program(source: str) -> tuple[str, ...]:
    return (sys.executable, "-c", PRELUDE + source)


def service(name: str, source: str, ready: Probe, grace: float = 10.0) -> Service:
    return Service(name, program(source), dict(os.environ), ready, grace)


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Poll what other processes do. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (files and processes set no event)
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
