"""`samovar cache`: the page, the finding of the stack, and what is said where there is none."""

import fcntl
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import rich.console

from services.cli import running
from services.cli.__main__ import main
from services.cli.cache import PATH, Caches, EngineCache, show
from services.cli.runtime import Runtime
from services.protocol.events import CachedRun, CacheTree

MIB = 2**20


def run(name: str, parent: str = "", start: int = 0, tokens: int = 640, **fields: Any) -> CachedRun:
    fields = {"device": tokens, "host": tokens, "idle_seconds": 3.0, **fields}
    return CachedRun(name=name.encode(), parent=parent.encode(), start=start, tokens=tokens, **fields)


def tree(*runs: CachedRun, **fields: Any) -> CacheTree:
    fields = {"page_bytes": 2 * MIB, "state_bytes": 147 * MIB, "states_total": 32, **fields}
    return CacheTree(engine_id="engine-0", runs=runs, pages_total=7200, **fields)


DEEP = [
    run(f"d{n}", f"d{n - 1}" if n else "opening", 18432 + 64 * n, 64, session_id="deep", standing="idle")
    for n in range(6)
]
TREE = tree(
    run(
        "opening",
        tokens=18432,
        session_id="main-session-id-1",
        standing="live",
        shared=True,
        checkpoints=((18432, "device"),),
    ),
    run(
        "main",
        "opening",
        18432,
        131072,
        device=65536,
        session_id="main-session-id-1",
        standing="waiting",
        checkpoints=((100000, "device"), (120000, "host"), (149504, "device")),
        idle_seconds=312.0,
    ),
    run("sub", "main", 149504, 64, host=0, session_id="sub", standing="finished", idle_seconds=7300.0),
    *DEEP,
    run("title", tokens=128, device=0, session_id="", standing="one_off", idle_seconds=200000.0),
    pages_held=288,
    pages_cached=1230,
    states_held=1,
    states_cached=2,
    left_out=12,
)
PAGE = """\
engine engine-0: 84,416 tokens on the device, 150,016 in the host tier
pages  [##======................................]
       of 7,200 (2.0 MiB each): 288 in use, 1,230 cached
states [#===....................................]
       of 32 (147 MiB each): 1 in use, 2 cached

context                          from   tokens     size device  host states idle
several sessions                    0   18,432  723 MiB    all   all      1   3s
  main~id-1 waiting            18,432  131,072  4.4 GiB    50%   all    2+1   5m
    sub finished              149,504       64  2.0 MiB    all     -      -   2h
  deep idle                    18,432       64  2.0 MiB    all   all      -   3s
    deep idle                  18,496       64  2.0 MiB    all   all      -   3s
      deep idle                18,560       64  2.0 MiB    all   all      -   3s
        deep idle              18,624       64  2.0 MiB    all   all      -   3s
    (5) deep idle              18,688       64  2.0 MiB    all   all      -   3s
    (6) deep idle              18,752       64  2.0 MiB    all   all      -   3s
? one_off                           0      128  4.0 MiB      -   all      -   2d
and 12 more, used longer ago
states: on the device + in the host tier only
"""


def shown(*engines: EngineCache, terminal: bool = False) -> str:
    out = io.StringIO()
    show(Caches(engines=engines), rich.console.Console(file=out, force_terminal=terminal, width=80))
    return out.getvalue()


def test_the_page() -> None:
    page = shown(EngineCache(engine_id="engine-0", state="ready", tree=TREE))
    assert page == PAGE
    assert max(map(len, page.splitlines())) <= 80
    assert page.isascii()


def test_colours_are_for_terminals() -> None:
    engine = EngineCache(engine_id="engine-0", state="ready", tree=TREE)
    assert "\x1b[" not in shown(engine)
    assert "\x1b[" in shown(engine, terminal=True)


def test_engines_without_a_cache_or_an_answer() -> None:
    page = shown(
        EngineCache(engine_id="engine-0", state="ready", tree=tree(state_bytes=0, pages_held=0, pages_cached=0)),
        EngineCache(engine_id="engine-1", state="loading", error="it is loading"),
    )
    assert page.splitlines()[-3:] == ["Nothing is cached.", "", "engine engine-1: no answer (it is loading)"]
    assert "states" not in page
    assert shown() == "No engine is heard.\n"


@pytest.fixture
def gateway() -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """Its address, and path and key of what it was asked; it wants the key `secret`."""
    asked: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["authorization"]))
            allowed = self.headers["authorization"] == "Bearer secret"
            engine = EngineCache(engine_id="engine-0", state="ready", tree=TREE)
            body = msgspec.json.encode(Caches(engines=[engine])) if allowed else b"{}"
            self.send_response(200 if allowed else 401)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which runs are looked for."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(running, "FALLBACK", tmp_path)
    return tmp_path


def test_the_stack_of_this_machine_is_asked(
    gateway: tuple[str, list[Any]],
    temp: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    url, asked = gateway
    monkeypatch.setenv("SAMOVAR_API_KEYS", "secret,other")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    runtime = Runtime.make()
    runtime.note(url=url)
    try:
        assert main(["cache"]) == 0
        assert capfd.readouterr().out == PAGE
        assert main(["cache", "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["engines"][0]["tree"]["pages_total"] == 7200
    finally:
        runtime.remove()
    assert asked == [(PATH, "Bearer secret")] * 2


def test_without_an_answer(
    gateway: tuple[str, list[Any]], temp: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    url, asked = gateway
    monkeypatch.delenv("SAMOVAR_API_KEYS", raising=False)
    for options, said in (
        ([], "no `samovar up` of yours runs on this machine"),
        (["--url", f"{url}/v1"], "needs an API key"),
        (["--url", url, "--key", "wrong"], "needs an API key"),
        (["--url", "http://127.0.0.1:9"], "does not answer"),
        (["--url", "http://"], "is no address"),
    ):
        assert main(["cache", *options]) == 1
        assert said in capfd.readouterr().err
    assert asked == [(PATH, None), (PATH, "Bearer wrong")]


def test_only_runs_that_live_are_found(temp: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dead = temp / "samovar-dead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "state.json").write_text('{"url": "http://dead"}')
    (temp / "samovar-none").mkdir()
    starting = temp / "samovar-starting"
    starting.mkdir()
    with (starting / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert running.urls() == []
        (starting / "state.json").write_text('{"url": "http://one"}')
        assert running.urls() == ["http://one"]
        runtime = Runtime.make()  # removes what is left of the dead one
        runtime.note(url="http://two")
        assert set(running.urls()) == {"http://one", "http://two"}
        assert main(["cache"]) == 1
        assert "several stacks run here" in capfd.readouterr().err
        runtime.remove()
