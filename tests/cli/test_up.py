"""The command `samovar up` as a process: what it refuses, what it shows, and what it leaves behind."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from tests.cli.standins import alive, until

SCRIPT = (
    {"when": "hello", "pieces": ["Good ", "day"], "delay_ms": 1, "finish": "stop"},
    {"when": "count", "pieces": ["1 ", "2 ", "3 ", "4 ", "5 ", "6"], "delay_ms": 150, "finish": "stop"},
    {"when": "wait", "pieces": ["never"], "delay_ms": 600_000, "finish": "stop"},
)
START_SECONDS = 60.0


class Up:
    """`samovar up` with its files under a folder of its own."""

    def __init__(self, folder: Path, *options: str, **environ: str) -> None:
        self.temp = folder / "tmp"
        self.temp.mkdir(exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SAMOVAR_", "OTEL_"))}
        own = {"TMPDIR": str(self.temp), "SAMOVAR_DATA_DIR": str(folder / "data")}
        self._out, self._err = folder / "stdout", folder / "stderr"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                (sys.executable, "-m", "services.cli", "up", *options),
                env=inherited | own | environ,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def state(self) -> dict:
        return json.loads(next(self.temp.glob("samovar-*/state.json")).read_text())

    def pids(self) -> dict[str, int | None]:
        return {name: child["pid"] for name, child in self.state()["children"].items()}

    async def until(self, condition: Callable[[], object]) -> None:
        """Raises AssertionError with the whole output when the process ends before."""

        def holds() -> object:
            assert self.process.poll() is None, self.err
            return condition()

        await until(holds, START_SECONDS)

    def end(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


@contextlib.asynccontextmanager
async def ask(client: httpx.AsyncClient, text: str) -> AsyncGenerator[AsyncIterator[str]]:
    """The pieces of a streamed answer, once its headers are there. Raises httpx.TransportError where it is cut."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": text}], "stream": True}

    async def pieces(reply: httpx.Response) -> AsyncIterator[str]:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    if content := choice["delta"].get("content"):
                        yield content

    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        yield pieces(reply)


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "script.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in SCRIPT))
    return f"scripted:{file}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engines", "none"), "SAMOVAR_ENGINES='none'"),
        (("--port", "70000"), "SAMOVAR_PORT='70000'"),
        (("--kv-size", "much"), "SAMOVAR_KV_ARENA='much'"),
        (("--host", "192.0.2.7"), "cannot listen on 192.0.2.7"),
    ],
)
def test_bad_options_are_one_line_and_start_nothing(tmp_path: Path, options: tuple[str, ...], message: str):
    up = Up(tmp_path, *options)
    assert up.end() == 2
    (line,) = up.err.splitlines()
    assert line.startswith("samovar: ")
    assert message in line
    assert list(up.temp.iterdir()) == []
    assert not (tmp_path / "data").exists()


def test_port_in_use(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        up = Up(tmp_path, "--port", str(port))
        assert up.end() == 2
    assert up.err == f"samovar: port {port} is in use: choose another one with --port\n"


def test_data_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").touch()
    up = Up(tmp_path, "--port", "0", SAMOVAR_DATA_DIR=str(tmp_path / "file" / "data"))
    assert up.end() == 2
    assert "SAMOVAR_DATA_DIR" in up.err
    assert list(up.temp.iterdir()) == []


def test_version():
    told = subprocess.run([sys.executable, "-m", "services.cli", "version"], capture_output=True, text=True, check=True)
    assert told.stdout.strip()


def test_arena_larger_than_memory_ends_it_with_the_stores_own_words(tmp_path: Path):
    up = Up(tmp_path, "--port", "0", "--kv-size", "1000TiB")
    assert up.end() == 2
    assert "kvstore ended with exit code 2 before it was ready" in up.err
    assert up.err.count("[kvstore]") == 1
    assert "SAMOVAR_KV_ARENA" in up.err
    assert list(up.temp.iterdir()) == []


def test_model_that_is_not_there(tmp_path: Path):
    up = Up(tmp_path, "--port", "0", "--model", f"scripted:{tmp_path / 'no.jsonl'}", "--kv-size", "1MiB")
    assert up.end() == 2
    assert "engine-0 ended with exit code 2 before it was ready" in up.err
    assert "no.jsonl" in up.err
    assert list(up.temp.iterdir()) == []


async def test_serves_restarts_and_leaves_nothing_behind(tmp_path: Path, script: str):
    up = Up(tmp_path, "--port", "0", "--model", script, "--kv-size", "1MiB", "--engines", "2")
    try:
        await up.until(lambda: "Ctrl-C stops it." in up.out)
        state = up.state()
        pids = up.pids()
        assert list(pids) == ["nats", "kvstore", "engine-0", "engine-1", "gateway"]
        assert all(pid is not None and alive(pid) for pid in pids.values())
        command = up.out.split("curl ", 1)[1].split("\n\n", 1)[0]
        answer = subprocess.run(f"curl -s {command}", shell=True, capture_output=True, text=True, check=True)
        assert json.loads(answer.stdout)["choices"][0]["message"]["role"] == "assistant"
        async with httpx.AsyncClient() as client:
            for name in ("engine-0", "kvstore"):
                metrics = await client.get(f"http://127.0.0.1:{state['children'][name]['metrics_port']}/metrics")
                assert metrics.status_code == 200

        os.kill(pids["engine-0"] or 0, signal.SIGKILL)
        await up.until(lambda: "engine-0 is back" in up.err)
        assert "samovar: engine-0 was killed by SIGKILL; starting it again in 0.5 s\n" in up.err
        pids = up.pids()

        up.process.send_signal(signal.SIGINT)
        assert up.end() == 0
    finally:
        up.process.kill()
        up.process.wait()
    assert [name for name, pid in pids.items() if pid and alive(pid)] == []
    assert list(up.temp.iterdir()) == []
    assert (tmp_path / "data" / "sessions.db").exists()


async def test_open_stream_ends_complete_on_sigterm_and_at_once_on_a_second_one(tmp_path: Path, script: str):
    up = Up(tmp_path, "--port", "0", "--model", script, "--no-kvstore", SAMOVAR_DRAIN_TIMEOUT="300")
    try:
        await up.until(lambda: "Ctrl-C stops it." in up.out)
        async with (
            httpx.AsyncClient(base_url=up.state()["url"], timeout=30) as client,
            ask(client, "wait") as waiting,
            ask(client, "count") as counting,
        ):
            text = await anext(counting)
            up.process.send_signal(signal.SIGTERM)
            text += "".join([piece async for piece in counting])
            assert up.process.poll() is None
            up.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.TransportError):
                [piece async for piece in waiting]
        assert up.end() == 0
    finally:
        up.process.kill()
        up.process.wait()
    assert text == "1 2 3 4 5 6"
    assert "SIGTERM again: ending everything now" in up.err
    assert list(up.temp.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
async def test_killed_supervisor_takes_its_services_along_and_the_next_run_cleans_up(tmp_path: Path, script: str):
    up = Up(tmp_path, "--port", "0", "--model", script, "--no-kvstore")
    await up.until(lambda: any(up.temp.glob("samovar-*/state.json")) and all(up.pids().values()))
    pids = [pid for pid in up.pids().values() if pid is not None]
    up.process.kill()
    up.process.wait()
    await until(lambda: not any(alive(pid) for pid in pids))
    assert len(list(up.temp.iterdir())) == 1
    second = Up(tmp_path, "--port", "0", "--kv-size", "1000TiB")
    assert second.end() == 2
    assert list(up.temp.iterdir()) == []


async def test_broken_off_while_it_starts(tmp_path: Path, script: str):
    up = Up(tmp_path, "--port", "0", "--model", script, "--no-kvstore")
    await up.until(lambda: any(up.temp.glob("samovar-*/state.json")) and up.pids()["nats"])
    pids = [pid for pid in up.pids().values() if pid is not None]
    up.process.send_signal(signal.SIGTERM)
    assert up.end() == 0
    assert not any(alive(pid) for pid in pids)
    assert list(up.temp.iterdir()) == []
