"""One running process of a service: spawn, read its log, stop."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from services.cli import launch
from services.cli.child_log import ChildLog
from services.cli.log_line import LogLine

_REST_OF_LOG_SECONDS = 1.0


class Child:
    """A process in a session (and process group) of its own, so that Ctrl-C in the terminal does not reach it.

    It ends with this process even after `kill -9` (Linux; see `launch`). All methods belong to one event loop, that of
    the main thread: the kernel ties a child's life to the thread that made it.
    """

    def __init__(self, process: asyncio.subprocess.Process, pipe: asyncio.ReadTransport, log: ChildLog) -> None:
        self.pid = process.pid
        self._process = process
        self._pipe = pipe
        self._log = log

    @classmethod
    async def spawn(
        cls, name: str, argv: Sequence[str], environ: Mapping[str, str], show: Callable[[LogLine], None]
    ) -> Self:
        """Start `argv`; `show` gets each line of its stdout and stderr. Raises OSError."""
        launcher = (sys.executable, "-IS", str(Path(launch.__file__)), str(os.getpid()))
        log = ChildLog(name, show)
        # Our own pipe: with one of asyncio's, some Pythons see the end of a process only when its grandchildren have
        # closed the pipe as well.
        reading, writing = os.pipe()
        pipe = None
        try:
            pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: log, os.fdopen(reading, "rb", 0))
            process = await asyncio.create_subprocess_exec(
                *launcher,
                *argv,
                env=environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
            )
        except BaseException:
            if pipe is not None:
                pipe.close()
            raise
        finally:
            os.close(writing)
        return cls(process, pipe, log)

    async def wait(self) -> int:
        """The exit code, -N after signal N. Its log has been read to the end then."""
        code = await self._process.wait()
        with contextlib.suppress(TimeoutError):  # a grandchild may hold the pipe open
            async with asyncio.timeout(_REST_OF_LOG_SECONDS):
                await self._log.ended.wait()
        return code

    async def stop(self, grace: float) -> int:
        """SIGTERM, `grace` seconds of patience, SIGKILL. Returns the exit code."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._process.wait()
        self.kill()
        code = await self.wait()
        self._pipe.close()
        return code

    def kill(self) -> None:
        """SIGKILL to the process and to whatever it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def tail(self, count: int) -> list[LogLine]:
        """The last lines of its log, oldest first."""
        return list(self._log.lines)[-count:]
