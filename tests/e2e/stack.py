"""Starts and breaks the real stack: `samovar up` and all its child processes, as a user would have them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

READY_SECONDS = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(what: str, condition: Callable[[], Any], seconds: float = 30) -> Any:
    """Poll a condition of other processes. Returns its first true value; fails naming `what`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what}")


class Stack:
    """A running `samovar up`. Its files live under `home`, so that leftovers can be seen."""

    def __init__(self, home: Path, *options: str, **settings: str) -> None:
        self.home = home
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.runtime = home / "tmp"
        self.runtime.mkdir(parents=True)
        self.log = home / "up.log"
        self._model = ""
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("SAMOVAR_", "OTEL_"))}
        environ |= {"TMPDIR": str(self.runtime), "SAMOVAR_DATA_DIR": str(home / "data"), "HF_HUB_OFFLINE": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.cli", "up", "--verbose", "--port", str(self.port), *options],
                env=environ | settings,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self) -> "Stack":
        wait_until("the stack is ready", self._ready, READY_SECONDS)
        return self

    def _ready(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"samovar up ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}")
        try:
            return httpx.get(f"{self.url}/health/ready", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def state(self) -> dict[str, Any]:
        (path,) = self.runtime.glob("*/state.json")
        return json.loads(path.read_text())

    def pid(self, service: str) -> int:
        return self.state()["children"][service]["pid"]

    def kill(self, service: str) -> int:
        """kill -9 of one child; returns the pid that it had."""
        pid = self.pid(service)
        os.kill(pid, signal.SIGKILL)
        return pid

    def metric(self, service: str, name: str) -> float:
        """The sum over all labels of a metric of one service."""
        url = (
            self.url
            if service == "gateway"
            else f"http://127.0.0.1:{self.state()['children'][service]['metrics_port']}"
        )
        total = 0.0
        for line in httpx.get(f"{url}/metrics").text.splitlines():
            if line.startswith((name + "{", name + " ")):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def chat(self, content: str | list[dict[str, str]], **fields: Any) -> dict[str, Any]:
        """One answer, not streamed. Raises httpx.HTTPStatusError."""
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        fields.setdefault("temperature", 0)
        reply = httpx.post(
            f"{self.url}/v1/chat/completions",
            json={"model": self.model(), "messages": messages, **fields},
            timeout=120,
        )
        reply.raise_for_status()
        return reply.json()

    def model(self) -> str:
        """The served model's name, which stays the same while engines come and go."""
        if not self._model:
            self._model = httpx.get(f"{self.url}/v1/models").json()["data"][0]["id"]
        return self._model

    def stop(self) -> int:
        """Ctrl-C; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(60)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


@contextmanager
def running(home: Path, *options: str, **settings: str) -> Iterator[Stack]:
    """A stack that is ready, and stopped afterwards."""
    stack = Stack(home, *options, **settings)
    try:
        yield stack.wait_ready()
    finally:
        stack.stop()
