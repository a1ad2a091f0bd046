"""What one request took and gave: kept while it runs, told once to metrics, span, log and sessions when it is over."""

import logging
import time

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode

from services import telemetry
from services.gateway.divergence import Parting
from services.gateway.errors import ApiError
from services.gateway.metrics import Metrics
from services.gateway.miss import Miss, explain
from services.gateway.sessions.records import RequestRecord
from services.gateway.sessions.store import SessionStore
from services.protocol.generate import FinishReason, SamplingParams, Usage

logger = logging.getLogger(__name__)
_tracer = telemetry.tracer(__name__)

CLIENT_CLOSED = 499
"""nginx's status for a client that left: it is logged and recorded, and nobody is there to be sent it."""

_PROVIDER = "samovar"


class Ledger:
    """Opened when a request's model is known. Closed by exactly one of `refused` and `finished`; later calls do
    nothing, so that every way out of a request may close it. On the event loop's thread."""

    def __init__(
        self,
        request_id: str,
        model: str,
        route: str,
        metrics: Metrics,
        sessions: SessionStore,
        *,
        arrived: float,
        traceparent: str = "",
        operation: str = "chat",
    ) -> None:
        """`arrived`: time.perf_counter() when the request came; `traceparent`: the client's, or empty; `operation`: a
        `gen_ai.operation.name`."""
        self.request_id = request_id
        self.model = model
        self.session_id = ""
        self.engine_id = ""
        self.reasoning_tokens = 0
        """Of the output, known when it is over."""
        self.parting: Parting | None = None
        """Of the prompt from those before it in its session."""
        self._metrics = metrics
        self._sessions = sessions
        self._arrived = arrived
        self._arrived_unix = time.time() - (time.perf_counter() - arrived)
        self._first_token = 0.0
        self._last_token = 0.0
        self._closed = False
        # The attribute names are those of OpenTelemetry's semantic conventions for generative AI (status: development).
        self.span = _tracer.start_span(
            f"{operation} {model}",
            context=telemetry.context_of(traceparent),
            kind=trace.SpanKind.SERVER,
            start_time=int(self._arrived_unix * 1e9),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": _PROVIDER,
                "gen_ai.request.model": model,
                "http.request.method": "POST",
                "http.route": route,
            },
        )

    def asked(self, sampling: SamplingParams, session_id: str, stream: bool) -> None:
        """The request is understood and about to go to an engine."""
        self.session_id = session_id
        if self.span.is_recording():
            self.span.set_attributes(
                {
                    "gen_ai.conversation.id": session_id,
                    "gen_ai.request.max_tokens": sampling.max_tokens,
                    "gen_ai.request.temperature": sampling.temperature,
                    "gen_ai.request.top_p": sampling.top_p,
                    "gen_ai.request.top_k": sampling.top_k,
                    "gen_ai.request.stream": stream,
                }
            )

    def explain(self, usage: Usage) -> Miss | None:
        """Why what was computed of the prompt was not found. Ages count to the request's arrival."""
        return explain(usage, self.parting, self._arrived_unix)

    def tokens(self) -> None:
        """Tokens have just arrived."""
        self._last_token = time.perf_counter()
        if not self._first_token:
            self._first_token = self._last_token

    def refused(self, error: ApiError) -> None:
        """No engine took the request."""
        if self._closed:
            return
        self._close(error.status, None, "", error.message)

    def finished(self, status: int, reason: FinishReason, usage: Usage, error: ApiError | None = None) -> None:
        """The answer is over. `status` is what the client got, or CLIENT_CLOSED; `error` what it was told if it did
        not get all."""
        if self._closed:
            return
        end = time.perf_counter()
        first = self._first_token - self._arrived if self._first_token else None
        gaps = usage.output_tokens - 1
        per_token = (self._last_token - self._first_token) / gaps if first is not None and gaps > 0 else None
        missed = self.explain(usage)
        self._metrics.answered(reason, usage, missed, first_token=first, per_token=per_token, total=end - self._arrived)
        if status == CLIENT_CLOSED:
            self._metrics.disconnect(before_first_token=not self._first_token)
        elif error is not None:
            self._metrics.error(error.code or error.type)
        if self.span.is_recording():
            attributes: dict[str, str | int | float | list[str]] = {
                "gen_ai.response.id": self.request_id,
                "gen_ai.response.model": self.model,
                "gen_ai.response.finish_reasons": [reason],
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.output_tokens,
                "gen_ai.usage.reasoning.output_tokens": self.reasoning_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "samovar.engine.id": self.engine_id,
                "samovar.usage.cached_device": usage.cached_device,
                "samovar.usage.cached_host": usage.cached_host,
                "samovar.usage.cached_disk": usage.cached_disk,
                "samovar.usage.computed_tokens": usage.computed_tokens,
                "samovar.usage.queue_seconds": usage.queue_seconds,
                "samovar.usage.restore_seconds": usage.restore_seconds,
            }
            if missed is not None:
                attributes["samovar.missed.reason"] = missed.reason
                attributes["samovar.missed.text"] = missed.text
                attributes["samovar.missed.found"] = missed.found
                attributes["samovar.missed.known"] = missed.known
            if first is not None:
                attributes["gen_ai.response.time_to_first_chunk"] = first
            self.span.set_attributes(attributes)
        logger.info(
            "%s %s status=%d finish=%s prompt=%d cached=%d (device %d, host %d, disk %d) computed=%d output=%d"
            " queue=%.3fs restore=%.3fs first_token=%s total=%.3fs%s",
            self.request_id,
            self.model,
            status,
            reason,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.cached_device,
            usage.cached_host - usage.cached_disk,
            usage.cached_disk,
            usage.computed_tokens,
            usage.output_tokens,
            usage.queue_seconds,
            usage.restore_seconds,
            "-" if first is None else f"{first:.3f}s",
            end - self._arrived,
            f" missed: {missed.text}" if missed is not None else "",
        )
        self._close(status, usage, reason, error.message if error is not None else "", missed)

    def _close(self, status: int, usage: Usage | None, reason: str, error: str, missed: Miss | None = None) -> None:
        self._closed = True
        if self.span.is_recording():
            self.span.set_attribute("http.response.status_code", status)
            if error:
                self.span.set_status(Status(StatusCode.ERROR, error))
        end = self._arrived_unix + (self._last_token - self._arrived) if self._last_token else None
        self.span.end(None if end is None else int(end * 1e9))
        self._sessions.record(
            RequestRecord(
                request_id=self.request_id,
                session_id=self.session_id,
                model=self.model,
                arrived=self._arrived_unix,
                status=status,
                engine_id=self.engine_id,
                usage=usage,
                finish_reason=reason,
                error=error,
                missed=missed,
            )
        )
