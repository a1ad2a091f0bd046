"""Reads a request's body up to a limit."""

from typing import Any

from litestar import Request

from services.gateway.errors import ApiError
from services.gateway.ledger import CLIENT_CLOSED
from services.settings import ByteSize


async def read_body(request: Request[Any, Any, Any], limit: ByteSize) -> bytes:
    """Raises ApiError: 413 beyond `limit` bytes, at once where the length is announced; 499 when the client leaves
    (Litestar's own reader reports that as a fault of the server)."""
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        event = await request.receive()
        if event["type"] != "http.request":
            raise ApiError(CLIENT_CLOSED, "invalid_request_error", "The client left before its request was read.")
        parts.append(event["body"])
        size += len(event["body"])
        if size > limit:
            raise _too_large(limit)
        if not event["more_body"]:
            return b"".join(parts)


def _too_large(limit: ByteSize) -> ApiError:
    return ApiError(
        413,
        "invalid_request_error",
        f"The request body is larger than {limit}, the limit of this server (SAMOVAR_BODY_LIMIT).",
        code="request_too_large",
    )
