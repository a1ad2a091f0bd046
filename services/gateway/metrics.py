"""Prometheus metrics of the gateway, all named `samovar_gateway_*`."""

from collections.abc import Callable, Iterable

from litestar.types import ASGIApp, Message, Receive, Scope, Send
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from services.gateway.engine_client import EngineClient
from services.gateway.miss import Miss
from services.gateway.sessions.store import SessionStore
from services.protocol.generate import FinishReason, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PREFIX = "samovar_gateway"
_FIRST_TOKEN_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5, 10, 20, 30, 60, 120, 300)
"""Seconds; up to five minutes, which a cold prompt of 200,000 tokens may take."""
_PER_TOKEN_BUCKETS = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_QUEUE_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5, 10, 20, 60, 300)
_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)


class Metrics:
    """One set per application, in a registry of its own. On the event loop's thread."""

    def __init__(self, engines: EngineClient, sessions: SessionStore, open_answers: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(namespace=_PREFIX, registry=self._registry)
        self._registry.register(_Elsewhere(engines, sessions))
        self._requests = self._counter("requests", "HTTP requests answered.", "route", "status")
        self._errors = self._counter("errors", "Requests answered with an error, by its code.", "type")
        self._finished = self._counter("finished", "Answers that ended, by how.", "reason")
        self._disconnects = self._counter("disconnects", "Clients that left before the end.", "phase")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that an engine took.")
        self._output_tokens = self._counter("output_tokens", "Tokens given to clients.")
        self._cached_tokens = self._counter("cached_tokens", "Prompt tokens not computed again, by where.", "tier")
        self._computed_tokens = self._counter("computed_tokens", "Prompt tokens run through a model.")
        self._missed_tokens = self._counter("missed_tokens", "Prompt tokens not found in a cache, by why.", "reason")
        self._queue = self._histogram(
            "queue_seconds", "From arrival at the engine to the first scheduled step, restore included.", _QUEUE_BUCKETS
        )
        self._restore = self._histogram(
            "restore_seconds", "Of requests that found something in the kvstore.", _QUEUE_BUCKETS
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token.", _FIRST_TOKEN_BUCKETS
        )
        self._per_token = self._histogram(
            "time_per_output_token_seconds", "Between tokens, mean of one request.", _PER_TOKEN_BUCKETS
        )
        self._request = self._histogram(
            "request_seconds", "From the request's arrival to its last token.", _REQUEST_BUCKETS
        )
        Gauge(f"{_PREFIX}_streams_open", "Answers under way, streamed or not.", registry=self._registry).set_function(
            open_answers
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{_PREFIX}_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{_PREFIX}_{name}", text, registry=self._registry, buckets=buckets)

    def counting(self, app: ASGIApp) -> ASGIApp:
        """Middleware: `app`, with its answers counted."""
        return RequestCounter(app, self._requests)

    def error(self, code: str) -> None:
        self._errors.labels(code).inc()

    def disconnect(self, before_first_token: bool) -> None:
        self._disconnects.labels("before_first_token" if before_first_token else "decode").inc()

    def answered(
        self,
        reason: FinishReason,
        usage: Usage,
        missed: Miss | None,
        *,
        first_token: float | None,
        per_token: float | None,
        total: float,
    ) -> None:
        """One request that an engine took is over. Times in seconds; None where it never got so far."""
        self._finished.labels(reason).inc()
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._output_tokens.inc(usage.output_tokens)
        self._cached_tokens.labels("device").inc(usage.cached_device)
        self._cached_tokens.labels("host").inc(usage.cached_host - usage.cached_disk)
        self._cached_tokens.labels("disk").inc(usage.cached_disk)
        self._computed_tokens.inc(usage.computed_tokens)
        if missed is not None:
            for why, tokens in missed.tokens(usage.prompt_tokens).items():
                self._missed_tokens.labels(why).inc(tokens)
        self._queue.observe(usage.queue_seconds)
        if usage.cached_host:
            self._restore.observe(usage.restore_seconds)
        if first_token is not None:
            self._first_token.observe(first_token)
        if per_token is not None:
            self._per_token.observe(per_token)
        self._request.observe(total)

    def render(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


class _Elsewhere(Collector):
    """What engine client, bus and session store count themselves, read when Prometheus asks."""

    def __init__(self, engines: EngineClient, sessions: SessionStore) -> None:
        self._engines = engines
        self._sessions = sessions

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        client, bus = self._engines.counters, self._engines.bus.counters
        for name, text, value in (
            ("token_gaps", "Token messages that arrived before an earlier one.", client.gaps),
            ("token_gaps_filled", "Gaps closed by asking the engine again.", client.gaps_filled),
            ("token_duplicates", "Token messages that brought nothing new.", client.duplicates),
            ("resumes", "Times that tokens were asked for again.", client.resumes),
            ("migrations", "Requests that went on after their engine was lost.", client.migrations),
            (
                "migrations_failed",
                "Requests that could not go on after their engine was lost.",
                client.migrations_failed,
            ),
            ("engines_lost", "Engines that fell silent.", client.engines_lost),
            ("stray_deltas", "Token messages of requests that were over.", client.stray_deltas),
            ("bus_slow_consumer_drops", "Messages that the NATS client threw away.", bus.slow_consumer_drops),
            ("bus_dropped_publishes", "Messages not sent for want of a connection.", bus.dropped_publishes),
            ("bus_reconnects", "Connections to NATS made anew.", bus.reconnects),
            ("bus_errors", "Errors that the NATS client reported.", bus.errors),
            ("session_rows_dropped", "Requests that could not be written.", self._sessions.dropped_rows),
        ):
            yield CounterMetricFamily(f"{_PREFIX}_{name}", text, value=value)


class RequestCounter:
    """ASGI middleware that counts answers by route and status; it looks at a response's first message only."""

    def __init__(self, app: ASGIApp, requests: Counter) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._requests.labels(scope["path_template"], str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, count)
