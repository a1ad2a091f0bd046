"""`python -m services.kvstore`: the store as a process, set by SAMOVAR_* variables.

Exit codes: 0 after SIGTERM or SIGINT, 2 when a setting cannot be used (one line on stderr says which).
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from contextlib import suppress

from services import settings, telemetry
from services.kvstore.arena import Arena, arena_size
from services.kvstore.config import KvStoreConfig
from services.kvstore.memory import memory_limit
from services.kvstore.metrics import KvStoreCollector, serve_metrics
from services.kvstore.server import Server
from services.kvstore.store import Store
from services.settings import ByteSize, SettingsError

log = logging.getLogger("services.kvstore")


def main() -> int:
    try:
        config = settings.load(KvStoreConfig)
        telemetry.start("kvstore", f"{socket.gethostname()}-{os.getpid()}", config.log_level)
        try:
            asyncio.run(run(config))
        finally:
            telemetry.stop()
    except SettingsError as error:
        print(f"samovar kvstore: {error}", file=sys.stderr)
        return 2
    return 0


async def run(config: KvStoreConfig) -> None:
    """Serve until SIGTERM or SIGINT, then write to disk what there is time for; a second signal ends that too. Raises
    SettingsError when the store cannot start."""
    task = asyncio.current_task()
    assert task is not None
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    arena = Arena(arena_size(config.kv_arena, memory_limit()))
    store = Store(arena, config.disk_space())
    server = Server(config.kv_socket, arena, store)
    metrics = None
    try:
        if config.metrics_port:
            metrics = serve_metrics(KvStoreCollector(store, server), config.metrics_host, config.metrics_port)
        store.start()
        log.info("ready: %s at %s", ByteSize(arena.size), config.kv_socket)
        with suppress(asyncio.CancelledError):
            await server.serve()
        await store.close(config.drain_timeout)
        log.info("stopped")
    finally:
        server.close()
        arena.close()
        if metrics is not None:
            metrics.shutdown()
            metrics.server_close()


if __name__ == "__main__":
    sys.exit(main())
