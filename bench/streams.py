"""What gateway and NATS add to each token, under 1, 16 and 64 streams of a scripted engine at 100 tokens/s each.

Added latency of a token: from the moment the engine's step loop delivered it to its arrival at the client's socket
(one monotonic clock for all processes of the machine). So it holds the engine's publishing, NATS, the gateway's
detokenizing and framing, and this load generator's own reading, which shares the machine's cores with the rest.
"""

import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

import psutil

from bench import results
from bench.load import Stream, chat
from bench.recording_engine import steps
from bench.scripted_stack import scripted_stack, stop

RATE = 100
TOKENS = 1000
WARM_UP = 100
"""Tokens of each stream that are not counted."""
STREAMS = (1, 16, 64)


def main(servers: tuple[str, ...] = ("uvicorn", "granian")) -> None:
    measured = {server: asyncio.run(_server(server)) for server in servers}
    path = results.write("gateway-streams", measured)
    print(f"written to {path}")


async def _server(server: str) -> dict[str, Any]:
    rows = {}
    print(f"{server}: {RATE} tokens/s a stream, {TOKENS - WARM_UP} tokens each counted")
    print(
        f"{'streams':>8} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8} {'gateway CPU s / 1000 tokens':>28} {'tokens/s':>9}"
    )
    for count in STREAMS:
        row = await _measure(server, count)
        rows[f"{count} streams"] = row
        print(
            f"{count:>8} {row['added_latency_ms']['p50']:>8.2f} {row['added_latency_ms']['p99']:>8.2f}"
            f" {row['added_latency_ms']['max']:>8.2f} {row['gateway_cpu_seconds_per_1000_tokens']:>28.4f}"
            f" {row['tokens_per_second']:>9.0f}"
        )
    return rows


async def _measure(server: str, count: int) -> dict[str, Any]:
    script = {"when": "go", "pieces": ["x"] * TOKENS, "delay_ms": 1000 / RATE, "finish": "stop"}
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"
        gateway, engine = ("bench.gateway_on", server), ("bench.recording_engine", str(record))
        with scripted_stack(script, gateway, engine) as stack:
            await stack.ready()
            before = _cpu(stack.gateway.pid)
            loop = asyncio.get_running_loop()
            began = loop.time()
            streams = await asyncio.gather(*(chat(stack.url, "scripted", "go") for _ in range(count)))
            seconds = loop.time() - began
            cpu = _cpu(stack.gateway.pid) - before
            stop(stack.engine)
            added = _added_latencies(streams, record)
    tokens = sum(len(piece) for stream in streams for piece in stream.text)
    assert tokens == count * TOKENS, f"{tokens} of {count * TOKENS} tokens arrived"
    added.sort()
    return {
        "added_latency_ms": {
            "p50": round(statistics.median(added), 3),
            "p99": round(added[int(len(added) * 0.99)], 3),
            "max": round(added[-1], 3),
        },
        "gateway_cpu_seconds_per_1000_tokens": round(cpu / tokens * 1000, 4),
        "tokens_per_second": round(tokens / seconds, 1),
    }


def _added_latencies(streams: list[Stream], record: Path) -> list[float]:
    """Milliseconds, one for each counted token."""
    delivered: dict[str, dict[int, int]] = {}
    for at, deltas in steps(record):
        for request_id, offset, tokens in deltas:
            delivered.setdefault(request_id, {}).update(dict.fromkeys(range(offset, offset + tokens), at))
    added = []
    for stream in streams:
        position = 0
        for piece, at in zip(stream.text, stream.arrivals, strict=True):
            for _ in piece:
                if position >= WARM_UP:
                    added.append((at - delivered[stream.request_id][position]) / 1e6)
                position += 1
    return added


def _cpu(pid: int) -> float:
    """Seconds of user and system time of a process and its children."""
    processes = [psutil.Process(pid)]
    processes += processes[0].children(recursive=True)
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))
