"""The real processes of the stack around a scripted engine, for as long as a measurement lasts."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from services.cli.stack import nats_config, nats_server

READY_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Stack:
    url: str
    gateway: subprocess.Popen[bytes]
    engine: subprocess.Popen[bytes]
    nats: subprocess.Popen[bytes]

    async def ready(self) -> None:
        """Wait until the gateway has an engine. Raises TimeoutError."""
        async with httpx.AsyncClient() as client, asyncio.timeout(READY_SECONDS):
            while True:
                try:
                    if (await client.get(f"{self.url}/health/ready")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.05)


@contextmanager
def scripted_stack(
    script: Mapping[str, Any],
    gateway: Sequence[str] = ("services.gateway",),
    engine: Sequence[str] = ("services.engine",),
    **settings: str,
) -> Iterator[Stack]:
    """NATS, gateway and an engine that answers by `script` (one line of its file). `gateway` and `engine`: the modules
    that run them, with arguments; `settings`: environment variables of both. All are stopped at the end."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as processes:
        home = Path(folder)
        (home / "script.jsonl").write_text(json.dumps(script) + "\n")
        nats_port, port = _free_port(), _free_port()
        (home / "nats.conf").write_text(nats_config(nats_port, "bench"))
        environ = os.environ | {
            "SAMOVAR_NATS_URL": f"nats://samovar:bench@127.0.0.1:{nats_port}",
            "SAMOVAR_MODEL": f"scripted:{home / 'script.jsonl'}",
            "SAMOVAR_PORT": str(port),
            "SAMOVAR_DATABASE": str(home / "sessions.db"),
            "SAMOVAR_LOG_LEVEL": "warning",
        }
        environ |= settings

        def start(*argv: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(argv, env=environ)
            processes.callback(stop, process)
            return process

        nats = start(str(nats_server()), "--config", str(home / "nats.conf"), "--log", str(home / "nats.log"))
        yield Stack(
            f"http://127.0.0.1:{port}",
            start(sys.executable, "-m", *gateway),
            start(sys.executable, "-m", *engine),
            nats,
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
