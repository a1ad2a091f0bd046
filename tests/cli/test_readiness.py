"""services.cli.readiness: each probe against the real thing, before, while and after it is there."""

import asyncio
import contextlib
import os
import sys
import sysconfig
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
import pytest

from services.cli import readiness
from services.cli.child import Child
from services.protocol import codec, subjects
from services.protocol.events import EngineState, Heartbeat, ModelCard
from tests.ports import free_port

CARD = ModelCard(
    name="tiny", fingerprint="f", max_model_len=64, block_tokens=64, vocab_size=9, tokenizer_digest="d", created=0
)


def ignore(fraction: float | None, detail: str) -> None:
    pass


@contextlib.asynccontextmanager
async def running(*argv: str, **environ: str) -> AsyncGenerator[Child]:
    child = await Child.spawn("x", argv, {**os.environ, **environ}, lambda line: None)
    try:
        yield child
    finally:
        await child.stop(5)


def nats_server(port: int) -> contextlib.AbstractAsyncContextManager[Child]:
    return running(str(Path(sysconfig.get_path("scripts")) / "nats-server"), "-a", "127.0.0.1", "-p", str(port))


async def not_yet(task: asyncio.Task[None]) -> None:
    """The probe has asked more than once by now and goes on."""
    done, _ = await asyncio.wait({task}, timeout=3 * readiness.POLL_SECONDS)
    assert not done


async def soon(awaitable: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaitable, 20)


async def test_nats():
    port = free_port()
    probe = asyncio.ensure_future(readiness.nats(port)(ignore))
    await not_yet(probe)
    async with nats_server(port):
        await soon(probe)


async def serve(port: int, answer: Callable[[bytes], bytes]) -> asyncio.Server:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(await reader.read(1024)))
        writer.close()

    return await asyncio.start_server(talk, "127.0.0.1", port)


async def test_another_program_on_the_port_is_not_nats():
    port = free_port()
    probe = asyncio.ensure_future(readiness.nats(port)(ignore))
    async with await serve(port, lambda request: b"220 mail.example ESMTP\r\n"):
        await not_yet(probe)
    probe.cancel()


async def test_kvstore(tmp_path: Path):
    socket = tmp_path / "kv.sock"
    probe = asyncio.ensure_future(readiness.kvstore(socket)(ignore))
    await not_yet(probe)
    store = (sys.executable, "-m", "services.kvstore")
    async with running(*store, SAMOVAR_KV_SOCKET=str(socket), SAMOVAR_KV_ARENA="1MiB"):
        await soon(probe)


async def test_nonsense_on_the_kvstore_socket(tmp_path: Path):
    socket = tmp_path / "kv.sock"

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x03\0\0\0abc")
        writer.close()

    probe = asyncio.ensure_future(readiness.kvstore(socket)(ignore))
    async with await asyncio.start_unix_server(talk, socket):
        await not_yet(probe)
    probe.cancel()


def http(ready: Callable[[], bytes]) -> Callable[[bytes], bytes]:
    def answer(request: bytes) -> bytes:
        path = request.split(b" ")[1]
        return b"HTTP/1.1 200 OK\r\n\r\n{}" if path == b"/health/live" else ready()

    return answer


async def test_gateway_lives_before_it_serves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    port = free_port()
    answers = [b"HTTP/1.1 200 OK\r\n\r\n{}", b'HTTP/1.1 503 Unavailable\r\n\r\n{"waiting_for": "an engine"}']
    live = asyncio.ensure_future(readiness.gateway("127.0.0.1", port)(ignore))
    await not_yet(live)
    async with await serve(port, http(lambda: answers[-1])):
        await soon(live)
        serving = asyncio.ensure_future(readiness.serving("127.0.0.1", port, timeout=20))
        await not_yet(serving)
        answers.pop()
        await soon(serving)


async def test_gateway_that_does_not_get_ready_says_what_is_missing():
    port = free_port()
    async with await serve(port, http(lambda: b"HTTP/1.1 503 Unavailable\r\n\r\nno engine")):
        with pytest.raises(TimeoutError, match=r"the gateway is not ready after 0\.3 s: no engine"):
            await readiness.serving("127.0.0.1", port, timeout=0.3)
    with pytest.raises(TimeoutError, match="no answer"):
        await readiness.serving("127.0.0.1", port, timeout=0.3)


@pytest.fixture
async def bus() -> AsyncIterator[tuple[str, nats.NATS]]:
    port = free_port()
    async with nats_server(port):
        await soon(readiness.nats(port)(ignore))
        client = await nats.connect(f"nats://127.0.0.1:{port}")
        yield f"nats://127.0.0.1:{port}", client
        await client.close()


class Engine:
    """Heartbeats of an engine that loads and gets ready, sent on demand."""

    def __init__(self, client: nats.NATS, engine_id: str) -> None:
        self._client = client
        self._id = engine_id

    async def beat(self, incarnation: str, state: EngineState, **rest: Any) -> None:
        beat = Heartbeat(engine_id=self._id, incarnation=incarnation, state=state, **rest)
        await self._client.publish(subjects.HEARTBEATS, codec.encode(beat))
        await self._client.flush()


async def repeat(beat: Callable[[], Awaitable[None]], until: Callable[[], bool]) -> None:
    """As an engine does: the listener may not have been there the first time."""
    async with asyncio.timeout(20):
        while not until():
            await beat()
            await asyncio.sleep(0.01)


async def test_engine_by_its_heartbeats(bus: tuple[str, nats.NATS]):
    url, client = bus
    engines = readiness.Engines(url)
    zero, one = Engine(client, "engine-0"), Engine(client, "engine-1")
    reports: list[tuple[float | None, str]] = []
    probe = asyncio.ensure_future(
        engines.probe("engine-0")(lambda fraction, detail: reports.append((fraction, detail)))
    )
    await repeat(
        lambda: zero.beat("a", "loading", progress=0.5, detail="layer 15"), lambda: (0.5, "layer 15") in reports
    )
    await client.publish(subjects.HEARTBEATS, b"nonsense")
    await one.beat("x", "ready", card=CARD)  # another engine's word does not count
    await zero.beat("a", "failed", detail="no memory")
    await repeat(lambda: asyncio.sleep(0), lambda: (0.0, "no memory") in reports)
    assert not probe.done()
    await repeat(lambda: zero.beat("a", "ready", card=CARD), probe.done)
    assert engines.card() == CARD

    # After a restart, what the dead process said last must not count.
    again = asyncio.ensure_future(engines.probe("engine-0")(ignore))
    for _ in range(20):
        await zero.beat("a", "ready", card=CARD)
    assert not again.done()
    await repeat(lambda: zero.beat("b", "ready", card=CARD), again.done)
    await engines.close()


async def test_engines_never_probed_need_no_nats():
    engines = readiness.Engines("nats://127.0.0.1:1")
    assert engines.card() is None
    await engines.close()
