"""OpenTelemetry and logging set-up, shared by every service; trace context in NATS headers.

Off (no-op spans, nothing sent) unless OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set; then
spans go out as OTLP over HTTP (protobuf). All standard OTEL_* variables apply.
"""

import logging
import os
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_propagator = TraceContextTextMapPropagator()
_provider: TracerProvider | None = None

TRACEPARENT = "traceparent"


def start(service: str, instance: str, log_level: str = "info") -> None:
    """Set up logging to stderr and, where an OTLP endpoint is configured, tracing. Once a process, first of all."""
    global _provider
    logging.basicConfig(
        level=log_level.upper(),
        format=f"%(asctime)s %(levelname)-7s {service} %(name)s: %(message)s",
    )
    for chatty in ("httpx", "urllib3", "opentelemetry", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    if not enabled():
        return
    # Imported late: it costs 150 ms and every service would pay it for nothing.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    resource = Resource.create({"service.name": f"samovar-{service}", "service.instance.id": instance})
    _provider = TracerProvider(resource=resource)
    _provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(_provider)


def enabled() -> bool:
    """Whether spans are exported."""
    return bool(os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))


def stop() -> None:
    """Send what is buffered. Bounded by OTEL_BSP_EXPORT_TIMEOUT."""
    if _provider is not None:
        _provider.shutdown()


def tracer(name: str) -> trace.Tracer:
    """`name` is the importing module's `__name__`."""
    return trace.get_tracer(name)


def traceparent(span: trace.Span) -> str:
    """A W3C traceparent naming `span`, empty when it is not recorded."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context=trace.set_span_in_context(span))
    return carrier.get(TRACEPARENT, "")


def context_of(parent: str) -> Context:
    """The context that a traceparent names; the empty context for an empty or malformed one."""
    return _propagator.extract({TRACEPARENT: parent}, context=Context())


def headers(span: trace.Span) -> dict[str, str] | None:
    """NATS headers that carry `span` as parent; None when there is nothing to carry."""
    parent = traceparent(span)
    return {TRACEPARENT: parent} if parent else None


def parent_of(nats_headers: Mapping[str, str] | None) -> str:
    """The traceparent in NATS headers, or empty."""
    return (nats_headers or {}).get(TRACEPARENT, "")
