"""`python -m services.engine`: one engine process, set by SAMOVAR_* variables.

Exit codes: 0 after SIGTERM or SIGINT (drained), 1 when the device or the step loop failed (a supervisor starts it
again), 2 when settings or model cannot be used (starting it again would not help; one line on stderr says why).
"""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

import uvloop

from services import settings, telemetry
from services.bus import Bus
from services.engine.assembly import Assembly, CannotLoad, assemble
from services.engine.config import EngineConfig
from services.engine.metrics import EngineMetrics
from services.engine.server import EngineServer

log = logging.getLogger("services.engine")

OK, FAILED, UNUSABLE = 0, 1, 2

T = TypeVar("T")


def main() -> int:
    try:
        config = settings.load(EngineConfig)
        telemetry.start("engine", config.engine_id, config.log_level)
        try:
            return uvloop.run(run(config))
        finally:
            telemetry.stop()
    except (settings.SettingsError, CannotLoad) as error:
        print(f"samovar engine: {error}", file=sys.stderr)
        return UNUSABLE


async def run(config: EngineConfig) -> int:
    """Serve until a signal or a failure; the exit code. Raises SettingsError or CannotLoad."""
    metrics = EngineMetrics()
    server = EngineServer(config, Bus(config.nats_url, f"engine {config.engine_id}"), metrics)
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    if config.metrics_port:
        metrics.serve(config.metrics_host, config.metrics_port)
    await server.start()
    engine: Assembly | None = None
    try:
        engine = await _unless(stop, _on_thread(lambda: assemble(config, server.progress)))
        if engine is not None:
            server.serve(engine.card, engine.chunks, engine.inbox, engine.core)
            await _unless(stop, asyncio.ensure_future(server.failed.wait()))
    except BaseException as error:
        server.fail(str(error) or type(error).__name__)
        raise
    finally:
        await server.drain(config.drain_timeout)
        if engine is not None:
            await asyncio.to_thread(engine.close)
    return FAILED if server.failed.is_set() else OK


def _on_thread(work: Callable[[], T]) -> "asyncio.Future[T]":
    """Run `work` on a daemon thread: unlike an executor's it does not keep the process from ending half-way."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def target() -> None:
        try:
            result = work()
        except BaseException as error:
            loop.call_soon_threadsafe(settle, None, error)
        else:
            loop.call_soon_threadsafe(settle, result, None)

    threading.Thread(target=target, name="loader", daemon=True).start()
    return future


async def _unless(stop: asyncio.Event, work: "asyncio.Future[T]") -> T | None:
    """The result of `work`, or None when `stop` is set before that."""
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if work.done():
        return work.result()
    work.cancel()
    return None


def leave(code: int) -> NoReturn:
    """End the process, whatever its threads do. A loader or core thread that is inside torch when the interpreter is
    taken down would abort the process."""
    if any(thread.name in ("loader", "core") for thread in threading.enumerate()):
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    leave(main())
