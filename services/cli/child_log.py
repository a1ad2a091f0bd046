"""What a child writes: cut into lines, shown, and the last of them kept."""

import asyncio
from collections import deque
from collections.abc import Callable

from services.cli import log_line
from services.cli.log_line import LogLine

KEPT_LINES = 200
"""For a failure message."""
LINE_BYTES = 16 * 1024
"""Text without a line break is taken in pieces of this size, so that memory stays bounded."""


class ChildLog(asyncio.Protocol):
    """The reading end of a pipe. `ended` is set when the last writer has closed it."""

    def __init__(self, service: str, show: Callable[[LogLine], None]) -> None:
        self.ended = asyncio.Event()
        self.lines: deque[LogLine] = deque(maxlen=KEPT_LINES)
        """Oldest first."""
        self._service = service
        self._show = show
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line)
        while len(rest) > LINE_BYTES:
            self._take(rest[:LINE_BYTES])
            rest = rest[LINE_BYTES:]
        self._rest = rest

    def connection_lost(self, exc: Exception | None) -> None:
        self._take(self._rest)
        self._rest = b""
        self.ended.set()

    def _take(self, raw: bytes) -> None:
        text = raw.decode(errors="replace").rstrip()
        if text:
            line = log_line.read(self._service, text, self.lines[-1] if self.lines else None)
            self.lines.append(line)
            self._show(line)
