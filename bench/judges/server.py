"""The stack that is judged: `samovar up` under a folder that stays, with its log, its session database and the process
ids of its services at hand."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from bench.stack import free_port

ENGINE, KVSTORE = "engine-0", "kvstore"
_LOG_END = 2000
_ROW_SECONDS = 10.0
"""In which the row of a request that is over must be in the database."""
_COLUMNS = ("prompt_tokens", "output_tokens", "cached_device", "cached_host", "finish_reason")
T = TypeVar("T")


class StackEnded(RuntimeError):
    """The stack is not there any more, or does not get ready; with the end of its log."""


@dataclass(frozen=True, slots=True)
class RequestRow:
    """What the gateway wrote down of a request that is over."""

    prompt_tokens: int
    output_tokens: int
    cached_device: int
    cached_host: int
    finish_reason: str

    @property
    def cached(self) -> int:
        return self.cached_device + self.cached_host


def wait_for(what: str, condition: Callable[[], T], seconds: float, pause: float = 0.02) -> T:
    """The first true value of a condition. Raises TimeoutError naming `what`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(pause)
    return value


class Server:
    def __init__(self, folder: Path, options: Sequence[str], settings: Mapping[str, str]) -> None:
        """`folder` is made, and stays with `up.log` when the stack has ended."""
        self.folder = folder
        self.log = folder / "up.log"
        self._runtime = folder / "run"
        self._data = folder / "data"
        self._runtime.mkdir(parents=True)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SAMOVAR_", "OTEL_"))}
        own = {"TMPDIR": str(self._runtime), "SAMOVAR_DATA_DIR": str(self._data), "SAMOVAR_VERBOSE": "true"}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.cli", "up", "--port", str(port), *options],
                env={**inherited, **own, **settings},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, seconds: float) -> float:
        """Seconds that it took. Raises StackEnded."""
        begin = time.monotonic()
        try:
            wait_for("the stack is ready", self._ready, seconds)
        except TimeoutError as error:
            raise StackEnded(f"{error}\n{self.log_end()}") from None
        return time.monotonic() - begin

    def _ready(self) -> bool:
        if self._process.poll() is not None:
            raise StackEnded(f"samovar up ended with {self._process.returncode}\n{self.log_end()}")
        try:
            return httpx.get(f"{self.url}/health/ready", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    def log_end(self) -> str:
        return self.log.read_text(errors="replace")[-_LOG_END:]

    def pid(self, service: str) -> int | None:
        """None while it is not running."""
        return self._children()[service]["pid"]

    def kill(self, service: str) -> None:
        """`kill -9`; returns when the supervisor has noticed."""
        pid = self.pid(service)
        if pid is None:
            raise StackEnded(f"{service} is not running\n{self.log_end()}")
        os.kill(pid, signal.SIGKILL)
        wait_for(f"the end of {service}", lambda: self.pid(service) != pid, 10)

    def metric(self, service: str, name: str, **labels: str) -> float:
        """The sum of a metric over all labels that are not given."""
        port = self._children()[service]["metrics_port"]
        total = 0.0
        for line in httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text.splitlines():
            sample, _, value = line.rpartition(" ")
            wanted = all(f'{label}="{text}"' in sample for label, text in labels.items())
            if sample.partition("{")[0] == name and wanted:
                total += float(value)
        return total

    def rows(self, since: int, count: int) -> list[RequestRow]:
        """Of the first `count` requests that were written down behind the first `since` ones. Raises TimeoutError when
        there are fewer."""
        return wait_for(f"{count} rows of requests", lambda: self._rows(since, count), _ROW_SECONDS)

    def row_count(self) -> int:
        with closing(self._database()) as database:
            return int(database.execute("SELECT count(*) FROM requests").fetchone()[0])

    def _rows(self, since: int, count: int) -> list[RequestRow]:
        query = f"SELECT {', '.join(_COLUMNS)} FROM requests ORDER BY number LIMIT ? OFFSET ?"
        with closing(self._database()) as database:
            rows = [RequestRow(*row) for row in database.execute(query, (count, since))]
        return rows if len(rows) == count else []

    def _database(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{self._data / 'sessions.db'}?mode=ro", uri=True)

    def _children(self) -> dict[str, Any]:
        (path,) = self._runtime.glob("*/state.json")
        return json.loads(path.read_text())["children"]

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


@contextmanager
def serving(folder: Path, options: Sequence[str], settings: Mapping[str, str], seconds: float) -> Generator[Server]:
    """A stack that is ready, and stopped afterwards. Raises StackEnded."""
    server = Server(folder, options, settings)
    try:
        ready = server.wait_ready(seconds)
        print(f"   ready after {ready:.1f} s; log: {server.log}", flush=True)
        yield server
    finally:
        server.stop()
