"""POST /v1/chat/completions."""

import time
from dataclasses import dataclass
from typing import Any

from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp

from services.gateway.asking import Arrival, Asking
from services.gateway.client_marks import session_hint
from services.gateway.conversation import Conversation, Question
from services.gateway.openai.chat_response import ChatCompletion, ChatResponse
from services.gateway.openai.messages import for_template
from services.gateway.openai.request import ChatRequest, parse
from services.gateway.openai.tools import function_tools
from services.gateway.openapi.described import GENERATES, KEY, Described
from services.gateway.resends import identity
from services.gateway.routes.body import read_body
from services.gateway.thinking import template_variables

PATH = "/v1/chat/completions"

_DESCRIBED = Described(
    summary="Answer a chat",
    body=ChatRequest,
    example={"messages": [{"role": "user", "content": "Hello!"}]},
    answer=ChatCompletion,
    events=True,
    errors=GENERATES,
)


@dataclass(frozen=True, slots=True)
class ChatRoute:
    asking: Asking

    def handler(self) -> HTTPRouteHandler:
        @post(PATH, status_code=200, opt={KEY: _DESCRIBED})
        async def chat_completions(request: Request[Any, Any, Any]) -> ASGIApp:
            return await self.answer(request)

        return chat_completions

    async def answer(self, request: Request[Any, Any, Any]) -> ASGIApp:
        """Raises ApiError."""
        at = time.perf_counter()
        body = await read_body(request, self.asking.config.body_limit)
        chat = parse(body)
        question = Question(
            prompt=Conversation(
                messages=for_template(chat.messages),
                tools=function_tools(chat.tools or ()),
                variables=template_variables(chat),
                may_call=chat.may_call,
            ),
            model=chat.model,
            sampling=chat.sampling,
            stops=chat.stops,
            stream=bool(chat.stream),
            session=session_hint(
                request.headers,
                session_id=chat.session_id,
                prompt_cache_key=chat.prompt_cache_key or chat.prompt_cache_key_camel,
                user=chat.user,
            ),
            cache_salt=chat.cache_salt or "",
        )
        traceparent = request.headers.get("traceparent", "")
        arrival = Arrival(PATH, traceparent, identity=identity(PATH, request.headers, body), at=at)
        answer = await self.asking.ask(question, arrival)
        ledger = answer.ledger
        renderer = ChatResponse(ledger.request_id, ledger.model, int(time.time()), chat.include_usage)
        return self.asking.respond(answer, renderer, stream=question.stream)
