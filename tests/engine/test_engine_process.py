"""The engine as a process: `python -m services.engine` with the scripted model, step loop and scheduler being real."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.bus import Bus
from services.engine.scripted_vocabulary import IM_END, IM_START, encode
from services.gateway.engine_client import EngineClient
from services.protocol.generate import SamplingParams
from tests.bus_rig import read_all, read_until
from tests.nats import NatsServer, eventually, free_port, nats_server

LINES = [
    {"when": "fast", "pieces": ["Hel", "lo", {"hex": "f09f98"}, {"hex": "80"}], "delay_ms": 0, "finish": "stop"},
    {"when": "slow", "pieces": [f"{i:03d} " for i in range(120)], "delay_ms": 10, "finish": "length"},
]


def user(text: str) -> list[int]:
    return [IM_START, *encode(f"user\n{text}".encode()), IM_END, *encode(b"\n"), IM_START, *encode(b"assistant\n")]


SLOW = list(encode("".join(f"{i:03d} " for i in range(120)).encode()))


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    with nats_server() as server:
        yield server


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in LINES))
    return path


async def start(**settings: str) -> Process:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SAMOVAR_", "OTEL_"))}
    environ |= {f"SAMOVAR_{name.upper()}": value for name, value in settings.items()}
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "services.engine", env=environ, stderr=PIPE)


async def end(process: Process, seconds: float = 20) -> tuple[int | None, str]:
    try:
        _, err = await asyncio.wait_for(process.communicate(), seconds)
    except TimeoutError:
        process.kill()
        _, err = await process.communicate()
        raise AssertionError(f"did not end:\n{err.decode()}") from None
    return process.returncode, err.decode()


@pytest.fixture
async def client(nats: NatsServer) -> AsyncIterator[EngineClient]:
    client = EngineClient(Bus(nats.url, "gw"), "gw")
    await client.start()
    yield client
    await client.close()


def params(max_tokens: int = 10_000) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, stop_token_ids=(IM_END,))


async def test_a_scripted_engine_serves_and_drains(nats: NatsServer, client: EngineClient, script: Path) -> None:
    engine = await start(nats_url=nats.url, model=f"scripted:{script}", max_queue="7", metrics_port=str(free_port()))
    await eventually(lambda: client.models(), 20, "ready")
    card = client.models()[0]
    bundle = await client.tokenizer(card)
    assert "im_end" in bundle.chat_template

    tokens, last = await read_all(await client.generate(card.name, user("be fast"), params()))
    assert bytes(tokens[:-1]).decode() == "Hello😀"
    assert (tokens[-1], last.finish) == (IM_END, "stop")
    assert last.usage is not None
    assert last.usage.prompt_tokens == len(user("be fast"))

    stream = await client.generate(card.name, user("be slow"), params())
    await read_until(stream, 40)
    stream.cancel()
    assert (await read_all(stream))[1].finish == "cancel"

    stream = await client.generate(card.name, user("be slow"), params())
    got = await read_until(stream, 8)
    engine.send_signal(signal.SIGTERM)
    tokens, last = await read_all(stream)
    assert got + tokens == SLOW
    assert last.finish == "length"
    code, err = await end(engine)
    assert code == 0, err


async def test_kill_9_of_an_engine_moves_its_streams(nats: NatsServer, client: EngineClient, script: Path) -> None:
    first = await start(nats_url=nats.url, model=f"scripted:{script}", engine_id="first")
    await eventually(lambda: client.models(), 20, "first is ready")
    streams = [await client.generate("scripted", user("slow"), params()) for _ in range(4)]
    got = [await read_until(stream, 20) for stream in streams]
    second = await start(nats_url=nats.url, model=f"scripted:{script}", engine_id="second")
    await eventually(lambda: len(client._engines.serving("scripted")) == 2, 20, "second is ready")
    first.kill()
    for before, stream in zip(got, streams, strict=True):
        tokens, last = await read_all(stream)
        assert before + tokens == SLOW
        assert (last.finish, stream.engine_id, stream.migrations) == ("length", "second", 1)
    await end(first)
    second.send_signal(signal.SIGTERM)
    code, err = await end(second)
    assert code == 0, err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nats_url": "http://x"}, "SAMOVAR_NATS_URL"),
        ({"max_running": "0"}, "SAMOVAR_MAX_RUNNING"),
        ({"model": "scripted:/nowhere.jsonl"}, "/nowhere.jsonl"),
        ({"model": "/nowhere.gguf"}, "/nowhere.gguf"),
    ],
)
async def test_what_cannot_be_used_is_one_line_and_exit_code_2(
    nats: NatsServer, settings: dict[str, str], message: str
) -> None:
    code, err = await end(await start(**{"nats_url": nats.url, "log_level": "error"} | settings))
    lines = err.strip().splitlines()
    assert code == 2, err
    assert message in lines[-1]
    assert "Traceback" not in err


async def test_a_metrics_port_in_use_is_named(nats: NatsServer, script: Path) -> None:
    code, err = await end(await start(nats_url=nats.url, model=f"scripted:{script}", metrics_port=str(nats.port)))
    assert code == 2, err
    assert f"SAMOVAR_METRICS_PORT={nats.port}" in err.splitlines()[-1]


async def test_sigterm_without_nats_and_while_loading_ends_at_once(script: Path) -> None:
    engine = await start(nats_url=f"nats://127.0.0.1:{free_port()}", model=f"scripted:{script}")
    assert engine.stderr is not None
    while b"is away" not in (line := await asyncio.wait_for(engine.stderr.readline(), 20)):
        assert line, "it ended"
    engine.send_signal(signal.SIGTERM)
    code, err = await end(engine, 10)
    assert code == 0, err
