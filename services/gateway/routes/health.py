"""HEAD /, GET /health/live, /health/ready and /metrics: for supervisors and Prometheus, so without a key."""

from litestar import Response, get, head
from litestar.handlers import HTTPRouteHandler
from msgspec import Struct

from services.gateway.engine_client import EngineClient
from services.gateway.metrics import CONTENT_TYPE, Metrics
from services.gateway.openapi.described import KEY, Described
from services.gateway.stream import SHUTTING_DOWN, OpenAnswers


class Health(Struct, frozen=True):
    status: str
    missing: str = ""
    """What keeps the gateway from serving, for people."""


def health_routes(engines: EngineClient, open_answers: OpenAnswers, metrics: Metrics) -> list[HTTPRouteHandler]:
    # Claude Code asks whether its base URL answers.
    @head("/", status_code=200, opt={KEY: Described(summary="Whether this server is here", open=True)})
    async def root() -> None:
        return None

    @get("/health/live", opt={KEY: Described(summary="Whether the process lives", open=True)})
    async def live() -> Health:
        return Health("ok")

    @get(
        "/health/ready",
        opt={KEY: Described(summary="Whether a model is ready", errors=(503,), error_body=Health, open=True)},
    )
    async def ready() -> Response[Health]:
        missing = SHUTTING_DOWN if open_answers.draining else engines.waiting_for()
        if missing:
            return Response(Health("unavailable", missing), status_code=503, headers={"retry-after": "1"})
        return Response(Health("ready"))

    @get(
        "/metrics",
        opt={KEY: Described(summary="Metrics for Prometheus", answer=str, media_type=CONTENT_TYPE, open=True)},
    )
    async def prometheus() -> Response[bytes]:
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE})

    return [root, live, ready, prometheus]
