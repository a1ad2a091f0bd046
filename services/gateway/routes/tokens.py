"""POST /tokenize and /detokenize: a model's token ids, without an engine's work.

Fields are those of vLLM (`prompt` or `messages`, `tokens`, `count`) and of llama.cpp (`content`, `tokens`).
"""

from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from msgspec import Struct

from services.gateway.asking import Asking
from services.gateway.conversation import Conversation, Question, RawPrompt
from services.gateway.errors import invalid
from services.gateway.json_body import decode
from services.gateway.openai.completion_request import checked_ids
from services.gateway.openai.messages import Message, for_template
from services.gateway.openai.tools import function_tools
from services.gateway.openapi.described import KEY, READS_BODY, Described
from services.gateway.routes.body import read_body
from services.gateway.thinking import Reasoning, Switch, template_variables


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking: Switch | bool | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: str | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


class Tokens(Struct, frozen=True, kw_only=True):
    tokens: list[int]
    count: int
    max_model_len: int


class Text(Struct, frozen=True):
    prompt: str
    content: str
    """The same."""


_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)

_TOKENIZES = Described(
    summary="Token ids of a text or a chat", body=TokenizeRequest, example={"prompt": "Hello!"}, errors=READS_BODY
)
_DETOKENIZES = Described(
    summary="The text of token ids", body=DetokenizeRequest, example={"tokens": [1, 2, 3]}, errors=READS_BODY
)


@dataclass(frozen=True, slots=True)
class TokensRoute:
    asking: Asking

    def handlers(self) -> list[HTTPRouteHandler]:
        @post("/tokenize", status_code=200, opt={KEY: _TOKENIZES})
        async def tokenize(request: Request[Any, Any, Any]) -> Tokens:
            return await self.tokenize(request)

        @post("/detokenize", status_code=200, opt={KEY: _DETOKENIZES})
        async def detokenize(request: Request[Any, Any, Any]) -> Text:
            return await self.detokenize(request)

        return [tokenize, detokenize]

    async def tokenize(self, request: Request[Any, Any, Any]) -> Tokens:
        """Raises ApiError."""
        body = decode(_tokenize, await read_body(request, self.asking.config.body_limit))
        card = self.asking.served.card(body.model)
        ids = await self.asking.tokens(Question(prompt=_prompt(body), model=card.name))
        return Tokens(tokens=ids, count=len(ids), max_model_len=card.max_model_len)

    async def detokenize(self, request: Request[Any, Any, Any]) -> Text:
        """Raises ApiError."""
        body = decode(_detokenize, await read_body(request, self.asking.config.body_limit))
        card = self.asking.served.card(body.model)
        language = await self.asking.language(card)
        text = await language.decode(checked_ids(body.tokens, card.vocab_size, "tokens")) if body.tokens else ""
        return Text(text, text)


def _prompt(body: TokenizeRequest) -> Conversation | RawPrompt:
    """Raises ApiError."""
    if body.messages is not None:
        return Conversation(
            messages=for_template(body.messages),
            tools=function_tools(body.tools or ()),
            variables=template_variables(body),
        )
    text = body.prompt if body.prompt is not None else body.content
    if text is None:
        raise invalid("prompt: Field required; or send `content` or `messages`.", "prompt")
    return RawPrompt(text)
