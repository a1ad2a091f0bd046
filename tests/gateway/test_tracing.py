"""One SERVER span a request, with the gen_ai attributes, whatever number of events it streams."""

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from services.gateway import ledger
from services.gateway.engine_errors import NoEngine
from tests.gateway.fake_engines import MODEL, FakeEngines
from tests.gateway.http_gateway import gateway

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(ledger, "_tracer", provider.get_tracer("test"))
    return exporter


def only(spans: InMemorySpanExporter) -> ReadableSpan:
    (span,) = spans.get_finished_spans()
    return span


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_is_one_span(stream: bool, spans: InMemorySpanExporter) -> None:
    async with gateway(FakeEngines().says("Hello", cached_device=4)) as g:
        response = await g.chat(
            stream=stream,
            session_id="s",
            temperature=0.5,
            headers={"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"},
        )
        call = g.engines.calls[0]
    span = only(spans)
    assert call.span is not None
    assert call.span.get_span_context() == span.context
    assert f"{span.context.trace_id:032x}" == TRACE
    assert (span.name, span.kind) == (f"chat {MODEL}", SpanKind.SERVER)
    assert span.end_time is not None
    assert span.start_time is not None
    assert span.end_time > span.start_time
    attributes = dict(span.attributes or {})
    first = attributes.pop("gen_ai.response.time_to_first_chunk")
    assert isinstance(first, float)
    assert 0 < first < 10
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "samovar",
        "gen_ai.conversation.id": "s",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": call.sampling.max_tokens,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.stream": stream,
        "gen_ai.response.id": response.headers["x-request-id"],
        "gen_ai.response.model": MODEL,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": len(call.prompt),
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.reasoning.output_tokens": 0,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "samovar.engine.id": "engine-0",
        "samovar.usage.cached_device": 4,
        "samovar.usage.cached_host": 0,
        "samovar.usage.cached_disk": 0,
        "samovar.usage.computed_tokens": 0,
        "samovar.usage.queue_seconds": 0.0,
        "samovar.usage.restore_seconds": 0.0,
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
    }
    assert span.status.status_code is StatusCode.UNSET


async def test_a_refused_request_ends_its_span_with_the_reason(spans: InMemorySpanExporter) -> None:
    engines = FakeEngines()
    engines.refusal = NoEngine("Nobody is there.")
    async with gateway(engines) as g:
        await g.chat()
    span = only(spans)
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "Nobody is there.")
    assert dict(span.attributes or {})["http.response.status_code"] == 503


async def test_an_answer_that_breaks_off_is_an_error(spans: InMemorySpanExporter) -> None:
    engines = FakeEngines()
    engines.on_call = lambda call: call.finish("error", "The device is gone.")
    async with gateway(engines) as g:
        await g.chat(stream=True)
    assert only(spans).status.description == "The device is gone."
