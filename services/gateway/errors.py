"""Errors as clients see them, decided before any header of a stream. Their own shape is OpenAI's; other API families
put them into theirs."""

import math
import uuid
from collections.abc import Sequence
from typing import Literal

import msgspec
from litestar import Response
from litestar.exceptions import HTTPException

from services.gateway.engine_errors import EngineError, EngineRejected, RequestTooLarge

ErrorType = Literal["invalid_request_error", "server_error"]

OVERLOADED = "server_is_overloaded"
"""The code of every 503: agents know it and wait, while other codes make some of them give up."""

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


class ApiError(Exception):
    """Ends a request with this answer. Immutable once made."""

    def __init__(
        self,
        status: int,
        type: ErrorType,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type: ErrorType = type
        self.message = message
        self.code = code
        """For programs."""
        self.param = param
        """The field at fault, as a path like `messages[2].content`."""
        self.retry_after = retry_after
        """Seconds."""
        self.allow = allow
        """Of a 405: the methods that its path has."""

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.allow:
            headers["allow"] = self.allow
        return headers

    def body(self) -> bytes:
        """`{"error": {...}}` as JSON, also sent as the last event of a stream that fails half-way."""
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, "invalid_request_error", message, code=code, param=param)


def unsupported(param: str, message: str) -> ApiError:
    """For a field that is refused because an answer that ignores it would be a wrong one."""
    return invalid(message, param, "unsupported_parameter")


def too_long(tokens: int, limit: int) -> ApiError:
    """Worded for the patterns by which agents recognise an overflow and then shorten their context."""
    return invalid(
        f"This model's maximum context length is {limit} tokens. However, your messages resulted in {tokens} tokens. "
        f"Please reduce the length of the messages (prompt is too long: {tokens} tokens > {limit} maximum).",
        "messages",
        "context_length_exceeded",
    )


def model_not_found(model: str, served: Sequence[str]) -> ApiError:
    names = ", ".join(f"`{name}`" for name in served)
    return ApiError(
        404,
        "invalid_request_error",
        f"The model `{model}` does not exist. Served here: {names}.",
        code="model_not_found",
        param="model",
    )


def unavailable(message: str, retry_after: float = 1.0) -> ApiError:
    return ApiError(503, "server_error", message, code=OVERLOADED, retry_after=retry_after)


def taken_over() -> ApiError:
    """For the client of a request that was sent again, should it still be there. No client tries again at a 410, as
    many do at a 409: two that are both alive would take the answer from each other for ever."""
    return ApiError(
        410, "invalid_request_error", "The same request was sent again and is answered there.", code="sent_again"
    )


def broken(message: str) -> ApiError:
    """The engine failed on a request that it had accepted."""
    return ApiError(500, "server_error", message, code="engine_error")


def from_engine(error: EngineError, prompt_tokens: int, limit: int) -> ApiError:
    """What a client is told when no stream came of its request."""
    if isinstance(error, RequestTooLarge):
        return ApiError(413, "invalid_request_error", str(error), code="request_too_large", param="messages")
    if isinstance(error, EngineRejected):
        if error.reason == "context_length":
            return too_long(prompt_tokens, limit)
        if error.reason == "bad_request":
            return invalid(error.message)
        return unavailable(error.message, error.retry_after)
    return unavailable(str(error))


def as_response(error: ApiError) -> Response[bytes]:
    """In OpenAI's shape."""
    return error_response(error, error.status, error.body())


def error_response(error: ApiError, status: int, body: bytes) -> Response[bytes]:
    """In the shape of `body`, which is JSON; the headers are those of `error`."""
    return Response(
        body,
        status_code=status,
        media_type="application/json",
        headers={"x-request-id": uuid.uuid4().hex, **error.headers()},
    )


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of any exception: of one that nobody foresaw, nothing but that it happened."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException) and error.status_code < 500:
        return _from_litestar(error)
    return ApiError(500, "server_error", "The server failed on this request; its log says why.", code="internal_error")


def _from_litestar(error: HTTPException) -> ApiError:
    """Unknown paths, wrong methods, and query parameters that cannot be used."""
    message, param = error.detail, None
    if isinstance(error.extra, list) and error.extra:
        first = error.extra[0]
        param = str(first.get("key", "")) or None
        message = f"{param}: {first.get('message', message)}"
    code = _HTTP_CODES.get(error.status_code)
    allow = (error.headers or {}).get("allow", "")
    return ApiError(error.status_code, "invalid_request_error", message, code=code, param=param, allow=allow)
