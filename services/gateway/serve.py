"""Runs the application on a socket until a signal, then lets open answers finish."""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Generator
from typing import Protocol

import uvicorn
from litestar.types import ASGIApp

from services.gateway.stream import OpenAnswers

logger = logging.getLogger(__name__)

BACKLOG = 2048
_CLOSE_SECONDS = 5
"""For connections that are still open when all answers are over."""


class PortInUse(OSError):
    """The message is one line for people."""


class HttpServer(Protocol):
    """What an HTTP server has to do for the gateway. uvicorn and granian were equal within noise under 50 streams;
    uvicorn runs on our own loop."""

    async def run(self) -> None:
        """Serve on the running loop, the application's lifespan included, until `stop`."""
        ...

    def stop(self) -> None: ...


class UvicornServer(uvicorn.Server):
    """uvicorn without its signal handlers: it would end the process by the signal, and streams with it."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # pyrefly: ignore[bad-argument-type]  litestar and uvicorn type the same protocol differently
                http="httptools",
                loop="none",
                ws="none",
                lifespan="on",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                # Agents keep connections open between turns; a reset on reuse costs them a retry.
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_CLOSE_SECONDS,
            )
        )
        self._listener = listener

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def run(self) -> None:  # pyrefly: ignore[bad-override]  uvicorn's `run` is for threads
        await self.serve(sockets=[self._listener])

    def stop(self) -> None:
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the system choose. Raises PortInUse, and OSError for another fault of the
    address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"port {port} of {host} is in use; choose another with SAMOVAR_PORT") from None
        raise
    # Connections inherit it. asyncio sets it only on sockets that were made by the name of TCP, which this one was not,
    # and then a body waits 40 ms for the acknowledgement of its headers.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(server: HttpServer, open_answers: OpenAnswers, drain_timeout: float) -> None:
    """Serve until SIGTERM or SIGINT. Then readiness turns to 503 and new requests are refused, open answers get
    `drain_timeout` seconds, those that still run are ended; a second signal ends them at once."""
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()

    def on_signal() -> None:
        if signalled.is_set():
            open_answers.end_all()
        signalled.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    running = asyncio.create_task(server.run())
    waiting = asyncio.create_task(signalled.wait())
    try:
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            logger.info("draining: %d answers are open", len(open_answers))
            await open_answers.drain(drain_timeout)
            server.stop()
        await running
    finally:
        waiting.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
