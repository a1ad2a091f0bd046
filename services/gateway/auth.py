"""API keys: optional, compared in constant time."""

import hmac
from collections.abc import Sequence
from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from services.gateway.errors import ApiError

HOW = "Send one as the header `Authorization: Bearer KEY` or `x-api-key: KEY`."


class ApiKeys:
    """A Litestar guard. With no keys everyone is let in, whatever key they send."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def __call__(self, connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        """Raises ApiError (401) that says how to send a key."""
        if not self._keys:
            return
        given = _given(connection)
        if not given:
            raise _unauthorized(f"This server needs an API key. {HOW}")
        # All keys are compared, so that the time says nothing about which one was nearly right.
        if not sum(hmac.compare_digest(key, given) for key in self._keys):
            raise _unauthorized(f"The API key is not one of this server's. {HOW}")


def _given(connection: ASGIConnection[Any, Any, Any, Any]) -> bytes:
    """The key of `Authorization: Bearer` or `x-api-key`, as it came over the wire (ASGI headers are latin-1)."""
    scheme, _, key = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip().encode("latin-1")
    return connection.headers.get("x-api-key", "").strip().encode("latin-1")


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, "invalid_request_error", message, code="invalid_api_key")
