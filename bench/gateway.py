"""What the gateway costs: 64 streams of 100 tokens/s each, whose thoughts, text and tool calls it parses and streams,
by OpenAI's chat and Anthropic's Messages API. NATS, gateway, scripted engine and load generator share two cores.

Added latency of a token: from the moment the engine's step loop delivered it to its arrival at the client's socket (one
monotonic clock). It is counted for each token behind which there is more to see; what the parser holds back, since it
may become a tag, counts from the token that set it free. A token is one piece of text here, as of a real vocabulary;
on the wire it is several ids, one a byte, so that the gateway has more to do than with a real one.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from bench import results
from bench.gateway_answers import Timeline, timeline
from bench.gateway_latency import Delivery, added, deliveries, percentiles
from bench.gateway_phase import FAMILIES, RATE, Load, Phase, filled, loaded
from bench.gateway_prompts import long_prompts
from bench.scripted_stack import scripted_stack, stop

STREAMS = 64
CORES = 2
ALLOWED_P99_MS = 20.0
SHORT_SECONDS = 40.0
SOAK_SECONDS = 600.0


def main(short: float = SHORT_SECONDS, soak: float = SOAK_SECONDS) -> None:
    """`short`: seconds of each phase with one API family; `soak`: of the one with both, whose memory is watched."""
    phases = [
        Phase("chat", ("chat",), STREAMS, short),
        Phase("messages", ("messages",), STREAMS, short),
        Phase("both", FAMILIES, STREAMS, soak),
    ]
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:CORES])  # what is started from here on inherits it
    try:
        measured = uvloop.run(_measure(phases))
    finally:
        os.sched_setaffinity(0, cores)
    print(f"written to {results.write('gateway-cpu', measured)}")


async def _measure(phases: list[Phase]) -> dict[str, Any]:
    answer = timeline()
    measured: dict[str, Any] = {"cores": CORES, "tokens_per_second_of_a_stream": RATE, "allowed_p99_ms": ALLOWED_P99_MS}
    print(f"{STREAMS} streams, {RATE} tokens/s each, answers of {len(answer.pieces)} tokens, {CORES} cores for all")
    for load, delivered in await _loads(phases, answer):
        measured[load.phase.name] = row = _row(load, delivered, answer)
        _print_row(load.phase.name, row)
    results.write("gateway-cpu", measured)  # ten minutes of work, whatever comes of the rest
    measured["beside_long_prompts"] = beside = await long_prompts(answer)
    _print_prompts(beside)
    return measured


async def _loads(phases: list[Phase], answer: Timeline) -> list[tuple[Load, dict[str, Delivery]]]:
    script = {"when": "go", "pieces": answer.pieces, "delay_ms": 1000 / RATE, "finish": "stop"}
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"
        with scripted_stack(script, engine=("bench.recording_engine", str(record))) as stack:
            await stack.ready()
            print("filling caches", flush=True)
            await filled(stack)
            loads = []
            for phase in phases:
                print(f"{phase.name}: {phase.seconds:g} s", flush=True)
                loads.append(await loaded(stack, phase, answer))
            stop(stack.engine)
            delivered = deliveries(record)
    return [(load, delivered) for load in loads]


def _row(load: Load, delivered: dict[str, Delivery], answer: Timeline) -> dict[str, Any]:
    latencies = {
        family: percentiles(added([e for e in load.exchanges if e.family == family], delivered, answer, *load.window))
        for family in load.phase.families
    }
    tokens = sum(
        load.begin <= at < load.end for exchange in load.exchanges for at in delivered[exchange.request_id].times
    )
    seconds = (load.end - load.begin) / 1e9
    return {
        "added_latency_ms": latencies,
        "cpu_seconds_per_1000_tokens": {name: round(cpu / tokens * 1000, 4) for name, cpu in load.cpu_seconds.items()},
        "cpu_share_of_one_core": {name: round(cpu / seconds, 3) for name, cpu in load.cpu_seconds.items()},
        "tokens_per_second": round(tokens / seconds, 1),
        "answers": len(load.exchanges),
        "gateway_memory": load.memory.measured(),
    }


def _print_row(name: str, row: dict[str, Any]) -> None:
    for family, values in row["added_latency_ms"].items():
        met = "met" if values["p99"] <= ALLOWED_P99_MS else "NOT MET"
        print(
            f"{name:>9} {family:<9} added latency ms  p50 {values['p50']:.2f}  p95 {values['p95']:.2f}"
            f"  p99 {values['p99']:.2f} (goal {ALLOWED_P99_MS:g}: {met})  max {values['max']:.1f}"
        )
    cpu, shares = row["cpu_seconds_per_1000_tokens"], row["cpu_share_of_one_core"]
    print(
        f"{'':>9} CPU s / 1000 tokens at {row['tokens_per_second']:.0f} tokens/s: "
        + ", ".join(f"{process} {cpu[process]:.4f} ({shares[process]:.0%} of a core)" for process in cpu)
    )
    memory = row["gateway_memory"]
    fit = ""
    if "flat" in memory:
        verdict = "flat" if memory["flat"] else "NOT FLAT"
        fit = f", by fit {memory['growth_mib_in_10_minutes_by_fit']:+.2f} MiB in 10 minutes: {verdict}"
    print(
        f"{'':>9} memory of the gateway: {memory['first_mib']:.1f} -> {memory['last_mib']:.1f} MiB in"
        f" {memory['seconds']:.0f} s{fit}"
    )


def _print_prompts(beside: dict[str, Any]) -> None:
    values = beside["added_latency_ms"]
    print(
        f"{beside['streams']} streams beside {beside['prompts']} prompts of 200,000 tokens: added latency ms"
        f"  p50 {values['p50']:.2f}  p99 {values['p99']:.2f}  max {values['max']:.1f};"
        f" longest stall of the gateway's event loop {beside['longest_stall_of_the_event_loop_ms']:.1f} ms,"
        f" {beside['stalls_over_10_ms']} over 10 ms"
    )
