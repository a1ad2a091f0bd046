"""The stack under a soak: its processes can be killed, weighed and asked for what they hold."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.stack import free_port
from services.protocol import codec, kv
from services.protocol.frames import FrameReader, frame

SERVICES = ("gateway", "engine", "kvstore")


class Stack:
    """`samovar up` with all its files under `home`."""

    def __init__(self, home: Path, options: tuple[str, ...], settings: dict[str, str]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._home = home
        self.log = home / "up.log"
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SAMOVAR_")}
        environ |= {"TMPDIR": str(home), "SAMOVAR_DATA_DIR": str(home / "data"), **settings}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.cli", "up", "--port", str(port), *options],
                env=environ,
                stdout=log,
                stderr=log,
            )

    def wait_ready(self, seconds: float) -> None:
        """Raises RuntimeError when it ends before, or is not ready in time."""
        deadline = time.monotonic() + seconds
        while not self.ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the stack is not ready:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.1)

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def children(self) -> dict[str, Any]:
        """What is known of each process, by its service. Engines are called `engine` here: there is one."""
        (path,) = self._home.glob("*/state.json")
        return {name.split("-")[0]: child for name, child in json.loads(path.read_text())["children"].items()}

    def kill(self, service: str) -> None:
        """kill -9; the supervisor starts it anew."""
        os.kill(self.children()[service]["pid"], signal.SIGKILL)

    def private_bytes(self) -> dict[str, tuple[int, int]]:
        """(process id, resident bytes that are its own) by service; the arena, which is shared, does not count."""
        sizes: dict[str, tuple[int, int]] = {}
        for service, child in self.children().items():
            try:
                status = Path(f"/proc/{child['pid']}/status").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue  # just killed
            for line in status.splitlines():
                if line.startswith("RssAnon:"):
                    sizes[service] = child["pid"], int(line.split()[1]) * 1024
        return sizes

    def metrics(self, service: str) -> dict[str, float]:
        """By name with labels, as Prometheus reads them."""
        child = self.children()[service]
        url = self.url if service == "gateway" else f"http://127.0.0.1:{child['metrics_port']}"
        found: dict[str, float] = {}
        for line in httpx.get(f"{url}/metrics", timeout=10).text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        return found

    def stat(self) -> kv.StatReply:
        """What the kvstore says of itself, to a client that holds nothing."""
        (path,) = self._home.glob("*/kv.sock")
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
            client.connect(str(path))
            client.sendall(frame(kv.Hello(call=1, client="soak", fingerprint="soak")) + frame(kv.Stat(call=2)))
            frames = FrameReader()
            while True:
                chunk, ancillary, _, _ = client.recvmsg(2**20, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC)
                for _, _, data in ancillary:
                    for descriptor in array("i", data):
                        os.close(descriptor)
                if not chunk:
                    raise RuntimeError("the kvstore has closed the connection")
                for payload in frames.feed(chunk):
                    reply = codec.kv_reply.decode(payload)
                    if isinstance(reply, kv.StatReply):
                        return reply

    def stop(self) -> None:
        """With SIGTERM: where the soak runs in a shell's background, SIGINT is ignored."""
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def running(home: Path, *options: str, **settings: str) -> Generator[Stack]:
    """A stack that is ready."""
    stack = Stack(home, options, settings)
    try:
        stack.wait_ready(120)
        yield stack
    finally:
        stack.stop()
