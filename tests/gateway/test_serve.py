"""Start and end of a gateway: signals, draining, ports, and a NATS server that is not there."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator

import httpx
import pytest

from services.gateway.app import Deps, create_app
from services.gateway.config import GatewayConfig
from services.gateway.serve import PortInUse, UvicornServer, listen, serve, url
from services.gateway.sessions import SessionStore
from tests.gateway.fake_engines import FakeEngines
from tests.gateway.http_gateway import HELLO, content, events

WAIT = 10.0


@contextlib.asynccontextmanager
async def served(drain_timeout: float) -> AsyncGenerator[tuple[FakeEngines, httpx.AsyncClient, asyncio.Task[None]]]:
    """A gateway that takes this process's signals."""
    engines = FakeEngines()
    deps = Deps(GatewayConfig(), engines, SessionStore("", 1000))  # type: ignore[arg-type]
    listener = listen("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=url(listener), timeout=WAIT, verify=False) as http:
        running = asyncio.create_task(
            serve(UvicornServer(create_app(deps), listener), deps.open_answers, drain_timeout)
        )
        try:
            assert (await http.get("/health/ready")).status_code == 200
            yield engines, http, running
        finally:
            if not running.done():
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(running, WAIT)


async def not_ready(http: httpx.AsyncClient) -> httpx.Response:
    async with asyncio.timeout(WAIT):
        # A probe polls, as those of a supervisor do.
        while (response := await http.get("/health/ready")).status_code == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return response


async def test_sigterm_lets_open_answers_finish() -> None:
    async with served(drain_timeout=WAIT) as (engines, http, running):
        asked = asyncio.create_task(http.post("/v1/chat/completions", json={**HELLO, "stream": True}))
        call = await engines.called()
        call.say("Hel")
        os.kill(os.getpid(), signal.SIGTERM)
        response = await not_ready(http)
        assert response.status_code == 503
        assert "shutting down" in response.json()["missing"]
        assert (await http.get("/health/live")).status_code == 200
        refused = await http.post("/v1/chat/completions", json=HELLO)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_is_overloaded"
        assert refused.headers["retry-after"]
        call.say("lo")
        call.finish()
        assert content(events((await asked).text)) == "Hello"
        await asyncio.wait_for(running, WAIT)
        assert not call.cancelled.is_set()
        assert engines.running == ["started", "closed"]


@pytest.mark.parametrize("stream", [True, False])
async def test_what_outlasts_the_drain_is_ended_with_an_error(stream: bool) -> None:
    async with served(drain_timeout=0.05) as (engines, http, running):
        engines.answer_cancel = False  # the engine need not be asked for the client to be told
        asked = asyncio.create_task(http.post("/v1/chat/completions", json={**HELLO, "stream": stream}))
        call = await engines.called()
        call.say("Hel")
        os.kill(os.getpid(), signal.SIGTERM)
        response = await asked
        await asyncio.wait_for(running, WAIT)
        assert call.cancelled.is_set()
        if stream:
            last = json.loads(response.text.strip().rpartition("data: ")[2])
            assert '"finish_reason":"' not in response.text
        else:
            assert response.status_code == 503
            assert response.headers["retry-after"]
            last = response.json()
        assert last["error"]["code"] == "server_is_overloaded"
        assert "shutting down" in last["error"]["message"]


async def test_a_second_signal_ends_open_answers_at_once() -> None:
    async with served(drain_timeout=600) as (engines, http, running):
        asked = asyncio.create_task(http.post("/v1/chat/completions", json={**HELLO, "stream": True}))
        await engines.called()
        os.kill(os.getpid(), signal.SIGINT)
        await not_ready(http)
        os.kill(os.getpid(), signal.SIGINT)
        assert "shutting down" in (await asked).text
        await asyncio.wait_for(running, WAIT)


def test_a_port_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} of 127.0.0.1 is in use"):
            listen("127.0.0.1", port)


def test_url_of_an_ipv6_address() -> None:
    try:
        listener = listen("::1", 0)
    except OSError:
        pytest.skip("no IPv6 here")
    with listener:
        assert url(listener) == f"http://[::1]:{listener.getsockname()[1]}"


def process(**settings: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SAMOVAR_", "OTEL_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "services.gateway"],
        env=environ | {f"SAMOVAR_{name.upper()}": value for name, value in settings.items()},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_process_serves_without_nats_and_ends_with_0_on_sigterm() -> None:
    with listen("127.0.0.1", 0) as nobody:
        nats_port = nobody.getsockname()[1]
    gateway = process(port="0", nats_url=f"nats://127.0.0.1:{nats_port}")
    try:
        assert gateway.stderr is not None
        address = gateway.stderr.readline().split()[-1]
        ready = httpx.get(f"{address}/health/ready", timeout=WAIT)
        assert ready.status_code == 503
        assert f"NATS at 127.0.0.1:{nats_port}" in ready.json()["missing"]
        chat = httpx.post(f"{address}/v1/chat/completions", json=HELLO, timeout=WAIT)
        assert (chat.status_code, chat.json()["error"]["code"]) == (503, "server_is_overloaded")
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(WAIT) == 0
        assert "Traceback" not in gateway.stderr.read()
    finally:
        gateway.kill()
        gateway.communicate()


@pytest.mark.parametrize("fault", ["port", "setting", "nats"])
def test_what_cannot_be_used_is_one_line_and_exit_2(fault: str) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        settings, named = {
            "port": ({"port": port}, port),
            "setting": ({"keepalive": "soon"}, "SAMOVAR_KEEPALIVE"),
            "nats": ({"port": "0", "nats_url": "http://nats"}, "SAMOVAR_NATS_URL"),
        }[fault]
        gateway = process(**settings)
        _, told = gateway.communicate(timeout=30)
    assert gateway.returncode == 2
    assert len(told.strip().splitlines()) == 1
    assert named in told


def test_connections_send_at_once() -> None:
    """Else the body of a small answer waits for the acknowledgement of its headers."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as _:
        accepted, _address = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
