"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp
from msgspec import Struct

from services.gateway.anthropic.content import for_template
from services.gateway.anthropic.errors import OVERLOADED_STATUS
from services.gateway.anthropic.message_response import MessageAnswer, MessageResponse
from services.gateway.anthropic.request import MessagesRequest, parse
from services.gateway.anthropic.tools import function_tools
from services.gateway.anthropic.user_id import session_of
from services.gateway.asking import Arrival, Asking
from services.gateway.client_marks import session_hint
from services.gateway.conversation import Conversation, Question
from services.gateway.openapi.described import KEY, AnthropicErrorBody, Described
from services.gateway.resends import identity
from services.gateway.routes.body import read_body

PATH = "/v1/messages"


class TokenCount(Struct, frozen=True):
    input_tokens: int


_EXAMPLE = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 256}
_READS = (400, 404, 413, OVERLOADED_STATUS)
_ANSWERS = Described(
    summary="Answer a chat, Anthropic's API",
    body=MessagesRequest,
    example=_EXAMPLE,
    answer=MessageAnswer,
    events=True,
    errors=(*_READS, 410, 500),
    error_body=AnthropicErrorBody,
)
_COUNTS = Described(
    summary="Count the tokens of a chat, Anthropic's API",
    body=MessagesRequest,
    example=_EXAMPLE,
    errors=_READS,
    error_body=AnthropicErrorBody,
)


@dataclass(frozen=True, slots=True)
class MessagesRoute:
    asking: Asking

    def handlers(self) -> list[HTTPRouteHandler]:
        @post(PATH, status_code=200, opt={KEY: _ANSWERS})
        async def messages(request: Request[Any, Any, Any]) -> ASGIApp:
            return await self.answer(request)

        @post(f"{PATH}/count_tokens", status_code=200, opt={KEY: _COUNTS})
        async def count_tokens(request: Request[Any, Any, Any]) -> TokenCount:
            return await self.count(request)

        return [messages, count_tokens]

    async def answer(self, request: Request[Any, Any, Any]) -> ASGIApp:
        """Raises ApiError."""
        at = time.perf_counter()
        body = await read_body(request, self.asking.config.body_limit)
        question = _question(parse(body), request.headers)
        traceparent = request.headers.get("traceparent", "")
        arrival = Arrival(PATH, traceparent, identity=identity(PATH, request.headers, body), at=at)
        answer = await self.asking.ask(question, arrival)
        renderer = MessageResponse(answer.ledger.request_id, answer.ledger.model, answer.prompt_tokens)
        return self.asking.respond(answer, renderer, stream=question.stream)

    async def count(self, request: Request[Any, Any, Any]) -> TokenCount:
        """The input tokens that the same body would have as a message. Raises ApiError."""
        body = parse(await read_body(request, self.asking.config.body_limit))
        return TokenCount(await self.asking.count(_question(body, request.headers)))


def _question(body: MessagesRequest, headers: Mapping[str, str]) -> Question:
    """Raises ApiError."""
    user_id = body.metadata.user_id if body.metadata is not None else None
    return Question(
        prompt=Conversation(
            messages=for_template(body.system, body.messages),
            tools=function_tools(body.tools or ()),
            variables=body.variables,
            may_call=body.may_call,
        ),
        model=body.model,
        sampling=body.sampling,
        stops=tuple(body.stop_sequences or ()),
        stream=bool(body.stream),
        session=session_hint(headers, metadata_user=session_of(user_id or "")),
        cache_salt=body.cache_salt or "",
    )
