"""What an endpoint's handler does not say by its types, for the OpenAPI document.

Handlers read bodies raw, so that errors name the field at fault and a body has a limit, and answer as they stream: so
neither a body's type nor an answer's is in their signatures.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

KEY = "openapi"
"""In a Litestar handler's `opt`."""

JSON = "application/json"
EVENTS = "text/event-stream"

READS_BODY = (400, 404, 413, 503)
"""Errors of an endpoint that reads a body and needs a model."""
GENERATES = (*READS_BODY, 410, 500)
"""Errors of an endpoint that generates."""


class ErrorObject(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    """The field at fault, as a path like `messages[2].content`."""
    code: str | None


class ErrorBody(Struct, frozen=True):
    """An error in OpenAI's shape."""

    error: ErrorObject


class AnthropicErrorObject(Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorBody(Struct, frozen=True, tag="error"):
    """An error in Anthropic's shape."""

    error: AnthropicErrorObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    summary: str
    body: type[Struct] | None = None
    """Of the request; it is JSON."""
    example: Mapping[str, Any] | None = None
    """A request body that is answered."""
    answer: object = None
    """The type of a whole answer; None: what the handler's return annotation says."""
    media_type: str = JSON
    """Of an answer that is not streamed. What is no JSON is a string."""
    events: bool = False
    """The answer may be a stream of server-sent events."""
    errors: tuple[int, ...] = ()
    """Statuses; 401 is added where keys are demanded."""
    error_body: type[Struct] = ErrorBody
    links: tuple[tuple[str, str], ...] = ()
    """(operationId, name of its parameter) of the operations that take a whole answer's `id`."""
    open: bool = False
    """Asks for no key."""
