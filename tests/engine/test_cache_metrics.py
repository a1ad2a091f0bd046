"""What a finished request found in which tier and why it missed the rest, in the engine's metrics and its span."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import generate_latest

from services.engine import request_trace
from services.engine.mailbox import Timeline
from services.engine.metrics import EngineMetrics
from services.protocol.generate import Missed, Usage


def timeline(missed: Missed | None, restore_seconds: float = 0.0, cached_host: int = 50) -> Timeline:
    usage = Usage(
        prompt_tokens=1000,
        output_tokens=1,
        cached_device=100,
        cached_host=cached_host,
        cached_disk=min(20, cached_host),
        computed_tokens=850,
        restore_seconds=restore_seconds,
        missed=missed,
    )
    return Timeline("r", 10, 20, 30, 40, 50, 60, "stop", usage)


EVICTED = Missed(reason="evicted", position=150, seen=640, since=1.5, taker="other")


def test_metrics() -> None:
    metrics = EngineMetrics()
    metrics.finished(timeline(EVICTED, restore_seconds=0.004), resumed=0)
    metrics.finished(timeline(Missed(reason="new", position=150)), resumed=0)
    metrics.finished(timeline(Missed(reason="store_full", position=100, seen=4096), 0.5, cached_host=0), resumed=0)
    metrics.finished(timeline(None, cached_host=0), resumed=0)
    text = generate_latest(metrics.registry).decode()
    for line in (
        'samovar_engine_cached_tokens_total{tier="device"} 400.0',
        'samovar_engine_cached_tokens_total{tier="host"} 60.0',
        'samovar_engine_cached_tokens_total{tier="disk"} 40.0',
        'samovar_engine_missed_tokens_total{reason="evicted"} 490.0',
        'samovar_engine_missed_tokens_total{reason="store_full"} 900.0',
        'samovar_engine_missed_tokens_total{reason="new"} 1210.0',
        'samovar_engine_restore_seconds_bucket{le="0.001"} 1.0',
        'samovar_engine_restore_seconds_bucket{le="0.005"} 2.0',
        "samovar_engine_restore_seconds_count 2.0",
    ):
        assert line in text


@pytest.mark.parametrize("missed", [EVICTED, None])
def test_span(missed: Missed | None) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    request_trace.end(provider.get_tracer("test").start_span("engine.generate"), timeline(missed, 0.25), "")
    (span,) = [span for span in exporter.get_finished_spans() if span.name == "engine.generate"]
    told = {name: value for name, value in (span.attributes or {}).items() if name.startswith("samovar.")}
    assert told == {
        "samovar.usage.cached_device": 100,
        "samovar.usage.cached_host": 50,
        "samovar.usage.cached_disk": 20,
        "samovar.usage.computed_tokens": 850,
        "samovar.usage.preemptions": 0,
        "samovar.usage.restore_seconds": 0.25,
    } | (
        {}
        if missed is None
        else {
            "samovar.missed.reason": "evicted",
            "samovar.missed.position": 150,
            "samovar.missed.seen": 640,
            "samovar.missed.since": 1.5,
            "samovar.missed.taker": "other",
        }
    )
