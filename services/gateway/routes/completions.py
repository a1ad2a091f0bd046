"""POST /v1/completions: raw prompts."""

import time
from dataclasses import dataclass
from typing import Any

from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp

from services.gateway.asking import Arrival, Asking
from services.gateway.client_marks import session_hint
from services.gateway.conversation import Question
from services.gateway.openai.completion_request import CompletionRequest, parse, raw_prompt
from services.gateway.openai.completion_response import CompletionResponse, TextCompletion
from services.gateway.openapi.described import GENERATES, KEY, Described
from services.gateway.routes.body import read_body

PATH = "/v1/completions"

_DESCRIBED = Described(
    summary="Go on with a raw prompt",
    body=CompletionRequest,
    example={"prompt": "Once upon a time", "max_tokens": 32},
    answer=TextCompletion,
    events=True,
    errors=GENERATES,
)


@dataclass(frozen=True, slots=True)
class CompletionsRoute:
    asking: Asking

    def handler(self) -> HTTPRouteHandler:
        @post(PATH, status_code=200, opt={KEY: _DESCRIBED})
        async def completions(request: Request[Any, Any, Any]) -> ASGIApp:
            return await self.answer(request)

        return completions

    async def answer(self, request: Request[Any, Any, Any]) -> ASGIApp:
        """Raises ApiError."""
        arrival = Arrival(PATH, request.headers.get("traceparent", ""), "text_completion")
        body = parse(await read_body(request, self.asking.config.body_limit))
        card = self.asking.served.card(body.model)
        question = Question(
            prompt=raw_prompt(body.prompt, card.vocab_size),
            model=card.name,
            sampling=body.sampling,
            stops=body.stops,
            stream=bool(body.stream),
            session=session_hint(
                request.headers,
                session_id=body.session_id,
                prompt_cache_key=body.prompt_cache_key,
                user=body.user,
            ),
            cache_salt=body.cache_salt or "",
        )
        answer = await self.asking.ask(question, arrival)
        renderer = CompletionResponse(answer.ledger.request_id, card.name, int(time.time()), body.include_usage)
        return self.asking.respond(answer, renderer, stream=question.stream)
