"""The gateway's application: everything is put together here, and nowhere else."""

import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from litestar import Litestar, Request, Response, Router

from services.gateway.auth import ApiKeys
from services.gateway.config import GatewayConfig
from services.gateway.engine_client import EngineClient
from services.gateway.errors import ApiError, as_api_error, as_response
from services.gateway.metrics import Metrics
from services.gateway.prompt.languages import Languages
from services.gateway.routes.chat import ChatRoute
from services.gateway.routes.health import health_routes
from services.gateway.routes.models import model_routes
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
    chat = ChatRoute(deps.config, engines, languages, sessions, metrics, open_answers)

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
        return as_response(api_error)

    for_clients = Router(
        path="/",
        guards=[ApiKeys(deps.config.api_keys)],
        route_handlers=[chat.handler(), *model_routes(engines), *session_routes(sessions)],
    )
    return Litestar(
        route_handlers=[for_clients, *health_routes(engines, open_answers, metrics)],
        lifespan=[lifespan],
        exception_handlers={Exception: failed},
        middleware=[metrics.counting],
        openapi_config=None,
        logging_config=None,
    )
