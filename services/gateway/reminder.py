"""When a stream has been silent for so long that its client should hear something."""

import asyncio
from collections.abc import Callable


class Reminder:
    """Calls `wake` when nothing was said for some seconds, and again as often as that is so, until it is closed.

    One timer for a whole stream, which is looked at when it runs out. A timeout around each wait for a token would cost
    a tenth of all that the gateway does for it. On the event loop's thread.
    """

    def __init__(self, seconds: float, wake: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._wake = wake
        self._due = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._due, self._look)

    @property
    def due(self) -> bool:
        """Nothing was said for so long."""
        return self._loop.time() >= self._due

    def said(self) -> None:
        """Something was said just now."""
        self._due = self._loop.time() + self._seconds

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self.due:
            self._timer = self._loop.call_later(self._seconds, self._look)
            self._wake()
        else:
            self._timer = self._loop.call_at(self._due, self._look)
