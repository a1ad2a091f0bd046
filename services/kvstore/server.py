"""The store's Unix socket: made, served, taken away."""

import asyncio
import logging
import os
import socket
import stat
from collections import Counter

from services.kvstore.arena import Arena
from services.kvstore.connection import Connection
from services.kvstore.store import Store
from services.settings import SettingsError

BACKLOG = 128

log = logging.getLogger(__name__)


class Server:
    """Listens from construction on; the socket file is unlinked by `close`."""

    def __init__(self, path: str, arena: Arena, store: Store) -> None:
        """Raises SettingsError when the path cannot be listened on, or a live store does so already."""
        self.calls: Counter[str] = Counter()
        """Calls since the start, by verb."""
        self._path = path
        self._arena = arena
        self._store = store
        self._clients: set[str] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self._listener, self._inode = _listen(path)

    @property
    def connections(self) -> int:
        return len(self._connections)

    async def serve(self) -> None:
        """Serve clients until cancelled; then end all connections."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    sock, _ = await loop.sock_accept(self._listener)
                except OSError as error:  # out of descriptors: those that are connected go on
                    log.error("cannot accept a connection: %s", error)
                    await asyncio.sleep(0.1)
                    continue
                connection = Connection(sock, self._arena, self._store, self.calls, self._clients)
                task = asyncio.create_task(connection.serve())
                self._connections.add(task)
                task.add_done_callback(self._connections.discard)
        finally:
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def close(self) -> None:
        """Stop listening and remove the socket file, unless it is another server's by now."""
        self._listener.close()
        try:
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)
        except FileNotFoundError:
            pass


def _listen(path: str) -> tuple[socket.socket, int]:
    """A listening socket and its file's inode. Only our own user may connect: blocks are other people's contexts."""
    _clear_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.setblocking(False)
        listener.bind(path)
        listener.listen(BACKLOG)
        return listener, os.stat(path).st_ino
    except OSError as error:
        listener.close()
        raise SettingsError(f"SAMOVAR_KV_SOCKET={path}: cannot listen there: {error}") from None
    finally:
        os.umask(mask)


def _clear_stale(path: str) -> None:
    """Remove the socket file of a server that was killed. Raises SettingsError when the path is in use."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise SettingsError(f"SAMOVAR_KV_SOCKET={path}: there is a file that is no socket; set another path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect(path)
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        os.unlink(path)
        log.info("removed %s, left behind by a server that was killed", path)
        return
    except BlockingIOError:
        pass  # somebody listens, with a full backlog
    except OSError as error:
        raise SettingsError(f"SAMOVAR_KV_SOCKET={path}: cannot be used: {error}") from None
    raise SettingsError(f"SAMOVAR_KV_SOCKET={path}: a kvstore is serving there already; stop it or set another path")
