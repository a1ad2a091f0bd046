"""What a person sees of `samovar up`: a live table of the start on a terminal, plain lines elsewhere; all on stderr."""

import contextlib
import io
import logging
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, TextIO

import rich.console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from services.cli.keeper import StartFailed
from services.cli.log_line import LogLine

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PLAIN_SECONDS = 5.0
"""Between two progress lines of one service, where the output is no terminal."""
HELD_LINES = 100


class Console:
    """Implements `keeper.Watcher`. A terminal that has gone away (SIGHUP, a closed pipe) never raises here."""

    def __init__(self, verbose: bool, stream: TextIO | None = None) -> None:
        """`verbose` shows all log lines of the services instead of warnings and worse."""
        file = lossy(sys.stderr if stream is None else stream)
        self._verbose = verbose
        self._out = rich.console.Console(
            file=file, force_terminal=file.isatty(), highlight=False, markup=False, emoji=False
        )
        self._live: Progress | None = None
        self._rows: dict[str, TaskID] = {}
        self._starting = True
        self._said_at: dict[str, float] = {}
        self._held: dict[str, deque[LogLine]] = {}

    def open(self) -> None:
        """Begin to show the start."""
        if self._out.is_terminal:
            self._live = Progress(
                SpinnerColumn(finished_text="[green]✓"),
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[detail]}", markup=False),
                console=self._out,
            )
            self._live.start()

    def started(self) -> None:
        """The start is over, well or not: from now on only lines are shown."""
        self._starting = False
        self._held.clear()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """A line of `samovar up` itself."""
        self._print(f"samovar: {text}")

    def failed(self, failure: StartFailed) -> None:
        self.say(str(failure))
        if not self._verbose:
            for line in failure.tail:
                self._show(line)

    def log(self, line: LogLine) -> None:
        """Warnings of a service's first start wait until that has gone well: else they are part of `failed`."""
        if self._verbose:
            self._show(line)
        elif line.level >= logging.WARNING:
            if line.service in self._held:
                self._held[line.service].append(line)
            else:
                self._show(line)

    def starting(self, service: str, fraction: float | None, detail: str) -> None:
        if not self._starting:
            return
        self._held.setdefault(service, deque(maxlen=HELD_LINES))
        if self._live is not None:
            self._show_row(service, fraction, detail)
        elif fraction is not None and time.monotonic() - self._said_at.get(service, 0.0) >= PLAIN_SECONDS:
            self._said_at[service] = time.monotonic()
            self._print(f"samovar: {service} {fraction:.0%} {detail}")

    def ready(self, service: str, seconds: float) -> None:
        if self._live is not None:
            self._show_row(service, 1.0, f"ready after {seconds:.1f} s")
        else:
            self.say(f"{service} is ready after {seconds:.1f} s")
        for line in self._held.pop(service, ()):
            self._show(line)

    def _show(self, line: LogLine) -> None:
        self._print(f"[{line.service}] {line.text}")

    def _show_row(self, service: str, fraction: float | None, detail: str) -> None:
        assert self._live is not None
        if service not in self._rows:
            self._rows[service] = self._live.add_task(service, total=None, detail="")
        total = None if fraction is None else 1.0
        self._live.update(self._rows[service], total=total, completed=fraction or 0.0, detail=detail)

    def _print(self, text: str) -> None:
        # Never wrapped: a log line is one line, whatever the terminal's width.
        self._out.print(text, soft_wrap=True)


def lossy(stream: TextIO) -> TextIO:
    """Another writer to the same file, which loses what cannot be written instead of raising.

    For a terminal that was closed or a reader that has gone: rich would leave the program, and the interpreter would
    end with exit code 120.
    """
    raw = _LossyFile(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, errors="backslashreplace", line_buffering=True)


class _LossyFile(io.FileIO):
    def write(self, data: "ReadableBuffer", /) -> int:
        with contextlib.suppress(OSError):
            super().write(data)
        return memoryview(data).nbytes
