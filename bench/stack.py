"""The whole stack for a measurement: `samovar up` with files of its own that go when it ends."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(*options: str, seconds: float = 300, **settings: str) -> Iterator[str]:
    """The URL of a stack that is ready. Raises RuntimeError when it ends before."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        environ = os.environ | {"TMPDIR": folder, "SAMOVAR_DATA_DIR": folder} | settings
        with (Path(folder) / "log").open("w+") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "services.cli", "up", "--port", str(port), *options],
                env=environ,
                stdout=log,
                stderr=log,
            )
            try:
                url = f"http://127.0.0.1:{port}"
                deadline = time.monotonic() + seconds
                while not _ready(url):
                    if process.poll() is not None or time.monotonic() > deadline:
                        log.seek(0)
                        raise RuntimeError(f"the stack did not get ready:\n{log.read()}")
                    time.sleep(0.05)
                yield url
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(60)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", timeout=2).status_code == 200
    except httpx.TransportError:
        return False
