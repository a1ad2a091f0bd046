"""`/api/sessions`: what the dashboard and people with curl read."""

from typing import Annotated

from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.params import Parameter

from services.gateway.errors import ApiError
from services.gateway.openapi.described import KEY, Described
from services.gateway.sessions.database import SessionsUnavailable
from services.gateway.sessions.records import SessionDetail, SessionPage
from services.gateway.sessions.store import SessionStore

LAST_REQUESTS = 100


def session_routes(store: SessionStore) -> list[HTTPRouteHandler]:
    """The handlers of `GET /api/sessions` and `GET /api/sessions/{id}`.

    They raise ApiError: 404 for an unknown session, 503 while the database cannot be read. The app shapes it, and
    lets in only whom it should.
    """

    @get("/api/sessions", opt={KEY: Described(summary="Sessions, newest first", errors=(400, 503))})
    async def list_sessions(
        limit: Annotated[int, Parameter(ge=1, le=500)] = 50,
        offset: Annotated[int, Parameter(ge=0, le=2**31)] = 0,
    ) -> SessionPage:
        """Newest first."""
        try:
            return await store.sessions(limit, offset)
        except SessionsUnavailable as error:
            raise _unavailable(error) from error

    # A path, since clients' ids may hold slashes; Litestar puts one in front.
    @get("/api/sessions/{session_id:path}", opt={KEY: Described(summary="One session", errors=(404, 503))})
    async def show_session(session_id: Annotated[str, Parameter()]) -> SessionDetail:
        """With its last LAST_REQUESTS requests, newest first."""
        session_id = session_id.removeprefix("/")
        try:
            detail = await store.session(session_id, LAST_REQUESTS)
        except SessionsUnavailable as error:
            raise _unavailable(error) from error
        if detail is None:
            raise ApiError(
                404,
                "invalid_request_error",
                f"There is no session `{session_id}` (any more).",
                code="session_not_found",
                param="session_id",
            )
        return detail

    return [list_sessions, show_session]


def _unavailable(error: SessionsUnavailable) -> ApiError:
    """Not the code of an overload: the models answer all the same."""
    return ApiError(503, "server_error", str(error), code="sessions_unavailable", retry_after=5.0)
