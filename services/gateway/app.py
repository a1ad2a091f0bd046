"""The gateway's application: everything is put together here, and nowhere else."""

import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from litestar import Litestar, Request, Response, Router
from litestar.config.cors import CORSConfig

from services.gateway.answer_memory import AnswerMemory
from services.gateway.anthropic import errors as anthropic
from services.gateway.asking import Asking
from services.gateway.auth import ApiKeys
from services.gateway.call_memory import CallMemory
from services.gateway.config import GatewayConfig
from services.gateway.divergence import Contexts
from services.gateway.engine_client import EngineClient
from services.gateway.errors import ApiError, as_api_error, as_response
from services.gateway.metrics import Metrics
from services.gateway.prompt.languages import Languages
from services.gateway.recollection import Recollection
from services.gateway.responses.store import ResponseStore
from services.gateway.routes.cache import cache_route
from services.gateway.routes.chat import ChatRoute
from services.gateway.routes.completions import CompletionsRoute
from services.gateway.routes.health import health_routes
from services.gateway.routes.messages import MessagesRoute
from services.gateway.routes.models import model_routes
from services.gateway.routes.openapi import openapi_route
from services.gateway.routes.responses import ResponsesRoute
from services.gateway.routes.tokens import TokensRoute
from services.gateway.served import ServedModels
from services.gateway.sessions import SessionStore, session_routes
from services.gateway.stream import OpenAnswers

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Deps:
    """What the application works with. It starts and closes `engines` and `sessions` itself."""

    config: GatewayConfig
    engines: EngineClient
    sessions: SessionStore
    open_answers: OpenAnswers = field(default_factory=OpenAnswers)


def create_app(deps: Deps) -> Litestar:
    """An ASGI application for one process and one event loop."""
    engines, sessions, open_answers = deps.engines, deps.sessions, deps.open_answers
    metrics = Metrics(engines, sessions, lambda: len(open_answers))
    languages = Languages(engines.tokenizer)
    served = ServedModels(engines, deps.config.model_aliases)
    asking = Asking(
        deps.config,
        engines,
        languages,
        served,
        sessions,
        Recollection(CallMemory(sessions), AnswerMemory(sessions)),
        Contexts(),
        metrics,
        open_answers,
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncGenerator[None, None]:
        await sessions.start()
        await engines.start()
        try:
            yield
        finally:
            await engines.close()
            await sessions.close()
            languages.close()

    def failed(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
        api_error = as_api_error(error)
        foreseen = isinstance(error, ApiError) or api_error.status < 500
        logger.log(
            logging.INFO if foreseen else logging.ERROR,
            "%s %s status=%d: %s",
            request.method,
            request.url.path,
            api_error.status,
            api_error.message,
            exc_info=None if foreseen else error,
        )
        metrics.error(api_error.code or api_error.type)
        return anthropic.as_response(api_error) if anthropic.expected_by(request) else as_response(api_error)

    for_clients = Router(
        path="/",
        guards=[ApiKeys(deps.config.api_keys)],
        route_handlers=[
            ChatRoute(asking).handler(),
            CompletionsRoute(asking).handler(),
            *MessagesRoute(asking).handlers(),
            *TokensRoute(asking).handlers(),
            *ResponsesRoute(asking, ResponseStore(sessions)).handlers(),
            *model_routes(served),
            *session_routes(sessions),
            cache_route(engines),
        ],
    )
    return Litestar(
        route_handlers=[
            for_clients,
            openapi_route(bool(deps.config.api_keys)),
            *health_routes(engines, open_answers, metrics),
        ],
        lifespan=[lifespan],
        exception_handlers={Exception: failed},
        middleware=[metrics.counting],
        # A browser asks with OPTIONS and without a key; this answers before any guard.
        cors_config=CORSConfig(
            allow_origins=list(deps.config.cors_origins), expose_headers=["x-request-id", "retry-after"]
        ),
        openapi_config=None,  # `routes.openapi` is in its place
        logging_config=None,
    )
