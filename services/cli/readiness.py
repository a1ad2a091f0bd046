"""When is a service ready? One probe a kind of service (see `service.Probe`)."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from nats.aio.msg import Msg

from services.bus import Bus
from services.cli.service import Probe, Report
from services.protocol import codec, kv, subjects
from services.protocol.events import Heartbeat, ModelCard
from services.protocol.frames import HEADER_BYTES, frame

POLL_SECONDS = 0.1
ANSWER_SECONDS = 2.0
"""A service that accepts a connection and does not answer for this long is asked again."""


def nats(port: int) -> Probe:
    """Ready when the server on the loopback `port` greets with its INFO line."""

    async def greets() -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            return (await reader.readline()).startswith(b"INFO ")
        finally:
            writer.close()

    return _asking(greets)


def kvstore(socket: Path) -> Probe:
    """Ready when Hello on the Unix socket is answered by Welcome (the arena's descriptor is not taken)."""
    hello = frame(kv.Hello(call=1, client="samovar-up", fingerprint=""))

    async def welcomes() -> bool:
        reader, writer = await asyncio.open_unix_connection(socket)
        try:
            writer.write(hello)
            length = int.from_bytes(await reader.readexactly(HEADER_BYTES), "little")
            return isinstance(codec.kv_reply.decode(await reader.readexactly(length)), kv.Welcome)
        finally:
            writer.close()

    return _asking(welcomes)


def gateway(host: str, port: int) -> Probe:
    """Ready when `GET /health/live` gives 200: the gateway itself is up, whether or not an engine has loaded."""

    async def lives() -> bool:
        status, _ = await _get(host, port, "/health/live")
        return status == 200

    return _asking(lives)


async def serving(host: str, port: int, timeout: float) -> None:
    """Wait until `GET /health/ready` gives 200. Raises TimeoutError, saying what the gateway answered last."""
    last = ""

    async def serves() -> bool:
        nonlocal last
        status, last = await _get(host, port, "/health/ready")
        return status == 200

    try:
        async with asyncio.timeout(timeout):
            await _asking(serves)(lambda fraction, detail: None)
    except TimeoutError:
        raise TimeoutError(f"the gateway is not ready after {timeout:g} s: {last or 'no answer'}") from None


async def _get(host: str, port: int, path: str) -> tuple[int, str]:
    """Status and body of a plain GET, by hand: an HTTP client would honour proxies and load TLS for each question."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        status = head.split(b" ", 2)[1:2]
        return int(status[0]) if status and status[0].isdigit() else 0, body.decode(errors="replace")
    finally:
        writer.close()


def _asking(question: Callable[[], Awaitable[bool]]) -> Probe:
    """Asks until the answer is yes. Nobody there, a broken connection, nonsense and silence are a no."""

    async def probe(report: Report) -> None:
        while True:
            with contextlib.suppress(OSError, EOFError, msgspec.DecodeError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    if await question():
                        return
            await asyncio.sleep(POLL_SECONDS)

    return probe


class Engines:
    """Listens to the heartbeats of all engines, over one connection that is made at the first probe."""

    def __init__(self, nats_url: str) -> None:
        self._bus = Bus(nats_url, "samovar-up")
        self._bus.subscribe(subjects.HEARTBEATS, self._on_heartbeat)
        self._started = False
        self._latest: dict[str, Heartbeat] = {}
        self._heard = asyncio.Condition()

    def probe(self, engine_id: str) -> Probe:
        """Ready when the engine says so itself, in an incarnation that was not heard before."""

        async def probe(report: Report) -> None:
            before = self._latest.get(engine_id)
            if not self._started:
                self._started = True
                await self._bus.start()
            report(None, "starting")
            async with self._heard:
                while True:
                    await self._heard.wait()
                    beat = self._latest.get(engine_id)
                    if beat is None or (before is not None and beat.incarnation == before.incarnation):
                        continue
                    if beat.state == "ready":
                        return
                    report(beat.progress, beat.detail or beat.state)

        return probe

    def card(self) -> ModelCard | None:
        """Of any engine that has told its model."""
        return next((beat.card for beat in self._latest.values() if beat.card is not None), None)

    async def close(self) -> None:
        if self._started:
            await self._bus.close()

    async def _on_heartbeat(self, message: Msg) -> None:
        with contextlib.suppress(msgspec.DecodeError):
            beat = codec.heartbeat.decode(message.data)
            async with self._heard:
                self._latest[beat.engine_id] = beat
                self._heard.notify_all()
