"""The spans of one request at the engine, made from its Timeline when it is over.

    engine.generate                 from acceptance to the last token, child of the gateway's span
      engine.queue                  arrival to the first scheduled step
      engine.restore                blocks on their way from the kvstore (lies within the queue)
      engine.prefill                first scheduled step to the first token
      engine.decode                 first token to the last

Attributes follow the `gen_ai.*` semantic conventions (status Development, so their names stand here as strings).
"""

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from services import telemetry
from services.engine.mailbox import Timeline
from services.protocol.events import ModelCard
from services.protocol.generate import GenerateRequest, SamplingParams

_tracer = telemetry.tracer(__name__)


def begin(wire: GenerateRequest, sampling: SamplingParams, card: ModelCard, engine_id: str, parent: str) -> Span:
    """Start the request's span; `parent` is a W3C traceparent, or empty."""
    return _tracer.start_span(
        "engine.generate",
        context=telemetry.context_of(parent),
        kind=SpanKind.CONSUMER,
        attributes={
            "gen_ai.operation.name": "generate_content",
            "gen_ai.provider.name": "samovar",
            "gen_ai.request.model": card.name,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.response.id": wire.request_id,
            "gen_ai.response.model": card.name,
            **({"gen_ai.conversation.id": wire.session_id} if wire.session_id else {}),
            "samovar.engine.id": engine_id,
            "samovar.request.resumed_tokens": len(wire.generated) // 4,
        },
    )


def end(span: Span, line: Timeline, error: str) -> None:
    """Close the request's span and its phases."""
    if not span.is_recording():
        return
    usage = line.usage
    for key, value in (
        ("gen_ai.response.finish_reasons", (line.finish,)),
        ("gen_ai.usage.input_tokens", usage.prompt_tokens),
        ("gen_ai.usage.output_tokens", usage.output_tokens),
        ("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens),
        ("samovar.usage.cached_device", usage.cached_device),
        ("samovar.usage.cached_host", usage.cached_host),
        ("samovar.usage.cached_disk", usage.cached_disk),
        ("samovar.usage.computed_tokens", usage.computed_tokens),
        ("samovar.usage.preemptions", usage.preemptions),
        ("samovar.usage.restore_seconds", usage.restore_seconds),
    ):
        span.set_attribute(key, value)
    if (missed := usage.missed) is not None:
        span.set_attributes(
            {
                "samovar.missed.reason": missed.reason,
                "samovar.missed.position": missed.position,
                "samovar.missed.seen": missed.seen,
                "samovar.missed.since": missed.since,
                "samovar.missed.taker": missed.taker,
            }
        )
    if line.first_token:
        span.set_attribute("gen_ai.response.time_to_first_chunk", (line.first_token - line.arrived) / 1e9)
    if line.finish == "error":
        span.set_status(Status(StatusCode.ERROR, error))
    context = trace.set_span_in_context(span)
    for name, started, ended in (
        ("engine.queue", line.arrived, line.scheduled or line.finished),
        ("engine.restore", line.restore_started, line.restore_ended or line.finished),
        ("engine.prefill", line.scheduled, line.first_token or line.finished),
        ("engine.decode", line.first_token, line.finished),
    ):
        if started:
            _tracer.start_span(name, context=context, start_time=started).end(ended)
    span.end(line.finished)
