"""Added latency: from the engine's step loop to the client's socket, token by token."""

import bisect
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.gateway_answers import Timeline
from bench.gateway_client import Exchange
from bench.recording_engine import steps


@dataclass(frozen=True, slots=True)
class Delivery:
    """When the engine gave the tokens of one request."""

    ends: "array[int]"
    """Ids so far, ascending."""
    times: "array[int]"
    """time.monotonic_ns()."""


def deliveries(record: Path) -> dict[str, Delivery]:
    """By request id, of an engine process that has ended."""
    found: dict[str, Delivery] = {}
    for now, deltas in steps(record):
        for request_id, offset, count in deltas:
            delivery = found.setdefault(request_id, Delivery(array("q"), array("q")))
            delivery.ends.append(offset + count)
            delivery.times.append(now)
    return found


def added(
    exchanges: Iterable[Exchange], delivered: dict[str, Delivery], answer: Timeline, begin: int, end: int
) -> "array[float]":
    """Milliseconds of each token that was delivered between `begin` and `end` (monotonic nanoseconds) and behind which
    there was more of the answer to see; ascending."""
    latencies = array("d")
    for exchange in exchanges:
        delivery = delivered[exchange.request_id]
        seen, before = 0, 0
        for token_end, shown in zip(answer.ends, answer.shown, strict=True):
            if shown == before:
                continue
            before = shown
            while seen < len(exchange.shown) and exchange.shown[seen] < shown:
                seen += 1
            if seen == len(exchange.shown):  # it broke off
                break
            at = delivery.times[bisect.bisect_left(delivery.ends, token_end)]
            if begin <= at < end:
                latencies.append((exchange.arrivals[seen] - at) / 1e6)
    return array("d", sorted(latencies))


def percentiles(latencies: "array[float]") -> dict[str, float]:
    """Of ascending values."""
    if not latencies:
        raise ValueError("no token was measured")
    last = len(latencies) - 1
    named = {f"p{share:g}": latencies[int(last * share / 100)] for share in (50, 95, 99, 99.9)}
    return {name: round(value, 3) for name, value in (named | {"max": latencies[-1]}).items()}
