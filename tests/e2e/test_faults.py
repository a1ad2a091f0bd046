"""Services that die in the middle of the work, and more clients than places."""

import asyncio
import json
import os
import signal
from pathlib import Path

import httpx

from tests.e2e.conftest import SCRIPT
from tests.e2e.stack import Stack, running, wait_until


def lines(stack: Stack, **fields: object):
    """The parsed `data:` chunks of a stream, as they come."""
    body = {
        "model": stack.model(),
        "stream": True,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    } | fields
    with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=body, timeout=120) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def text_of(chunks: list[dict]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def finish_of(chunks: list[dict]) -> list[str]:
    return [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c.get("finish_reason")]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def break_after(stack: Stack, pieces: int, action, **fields: object) -> list[dict]:
    """Read a whole stream, doing `action` once after so many chunks with text."""
    seen = []
    for chunk in lines(stack, **fields):
        seen.append(chunk)
        if action and sum(bool(text_of([c])) for c in seen) >= pieces:
            action()
            action = None
    assert action is None, "the stream ended before the fault"
    return seen


def test_kvstore_killed_in_a_stream(smollm: Stack) -> None:
    fields = {"messages": user("Write a long story about a river."), "max_tokens": 80}
    calm = list(lines(smollm, **fields))
    dead = smollm.pid("kvstore")
    broken = break_after(smollm, 8, lambda: smollm.kill("kvstore"), **fields)
    assert text_of(broken) == text_of(calm)
    assert finish_of(broken) == finish_of(calm)
    wait_until("the kvstore is back", lambda: smollm.pid("kvstore") != dead)


def test_engine_killed_in_a_stream(tmp_path: Path) -> None:
    """The client sees a pause; the text is the text it would have been, sampled or greedy."""
    with running(tmp_path, "--kv-size", "128MiB") as stack:
        for temperature in (0, 1):
            fields = {
                "messages": user("Write a story about a river."),
                "max_tokens": 60,
                "seed": 5,
                "temperature": temperature,
            }
            calm = list(lines(stack, **fields))
            broken = break_after(stack, 8, lambda: stack.kill("engine-0"), **fields)
            assert text_of(broken) == text_of(calm)
            assert finish_of(broken) == finish_of(calm)
            assert broken[-1]["usage"]["completion_tokens"] == calm[-1]["usage"]["completion_tokens"]


def test_nats_killed_in_a_stream(tmp_path: Path) -> None:
    with running(tmp_path, "--model", f"scripted:{SCRIPT}", "--kv-size", "64MiB") as stack:
        broken = break_after(stack, 20, lambda: stack.kill("nats"), messages=user("slow"))
        assert text_of(broken) == "".join(f"w{i} " for i in range(400))
        assert finish_of(broken) == ["stop"]


async def test_a_hundred_clients_on_a_queue_of_eight(scripted: Stack) -> None:
    body = {"model": scripted.model(), "messages": user("hold")}
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=100)) as client:
        replies = await asyncio.gather(
            *(client.post(f"{scripted.url}/v1/chat/completions", json=body) for _ in range(100))
        )
    answered = [r for r in replies if r.status_code == 200]
    refused = [r for r in replies if r.status_code == 503]
    assert len(answered) + len(refused) == 100
    assert len(answered) >= 16
    assert refused
    for reply in answered:
        assert reply.json()["choices"][0]["message"]["content"] == "done"
    for reply in refused:
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.json()["error"]["code"] == "server_is_overloaded"


def test_a_client_that_goes_away_frees_its_place(scripted: Stack) -> None:
    body = {"model": scripted.model(), "messages": user("slow"), "stream": True}
    with httpx.stream("POST", f"{scripted.url}/v1/chat/completions", json=body, timeout=60) as reply:
        arriving = reply.iter_lines()
        next(arriving)
        wait_until("it runs", lambda: scripted.metric("engine-0", "samovar_engine_requests_running") == 1)
    wait_until("it is gone", lambda: scripted.metric("engine-0", "samovar_engine_requests_running") == 0, 2)


def test_pieces_cut_inside_a_character(scripted: Stack) -> None:
    chunks = list(lines(scripted, messages=user("emoji")))
    assert text_of(chunks) == "a \N{GRINNING FACE} b"
    assert finish_of(list(lines(scripted, messages=user("cut")))) == ["length"]


def test_a_killed_supervisor_leaves_no_process(tmp_path: Path) -> None:
    with running(tmp_path, "--model", f"scripted:{SCRIPT}", "--kv-size", "64MiB") as stack:
        pids = [child["pid"] for child in stack.state()["children"].values()]
        os.kill(stack.process.pid, signal.SIGKILL)
        for pid in pids:
            wait_until(f"process {pid} ended", lambda p=pid: not _alive(p), 10)


def test_stopping_lets_streams_finish_and_leaves_nothing(tmp_path: Path) -> None:
    with running(tmp_path, "--model", f"scripted:{SCRIPT}", "--kv-size", "64MiB") as stack:
        pids = [child["pid"] for child in stack.state()["children"].values()]
        chunks = break_after(stack, 10, lambda: stack.process.send_signal(signal.SIGTERM), messages=user("slow"))
        assert finish_of(chunks) == ["stop"]
        assert stack.process.wait(30) == 0
        assert not any(map(_alive, pids))
        assert list(stack.runtime.iterdir()) == []


def _alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"
