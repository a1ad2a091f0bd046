"""GET /openapi.json: what this server takes and answers, for people and for tools that make clients."""

from typing import Any

import msgspec
from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler

from services.gateway.openapi.described import KEY, Described
from services.gateway.openapi.document import document

PATH = "/openapi.json"


def openapi_route(keys: bool) -> HTTPRouteHandler:
    """`keys`: see `document`."""
    made: list[bytes] = []

    @get(PATH, opt={KEY: Described(summary="This document", answer=dict[str, Any], open=True)})
    async def openapi(request: Request[Any, Any, Any]) -> Response[bytes]:
        # Made once, when all routes are there.
        if not made:
            made.append(msgspec.json.encode(document(request.app, keys)))
        return Response(made[0], media_type="application/json")

    return openapi
