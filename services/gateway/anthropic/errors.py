"""Errors in Anthropic's envelope, with its statuses."""

from typing import Any

import msgspec
from litestar import Request, Response

from services.gateway.errors import ApiError, error_response

OVERLOADED_STATUS = 529
"""Anthropic's status for `try again later`: its clients wait at it, as OpenAI's do at a 503."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def status(error: ApiError) -> int:
    return OVERLOADED_STATUS if error.status == 503 else error.status


def body(error: ApiError) -> bytes:
    """`{"type": "error", "error": {"type", "message"}}` as JSON: an answer's body, or the data of an `error` event."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}})


def expected_by(request: Request[Any, Any, Any]) -> bool:
    """Whether a client reads errors in this shape. Its models are listed under a path that all families share."""
    return request.url.path.startswith("/v1/messages") or "anthropic-version" in request.headers


def as_response(error: ApiError) -> Response[bytes]:
    return error_response(error, status(error), body(error))
