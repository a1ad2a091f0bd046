"""The body of POST /v1/chat/completions: parsed and checked once, unknown fields ignored."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from services.gateway.conversation import SamplingWishes
from services.gateway.errors import unsupported
from services.gateway.json_body import decode
from services.gateway.openai.generation_request import GenerationRequest
from services.gateway.openai.messages import Message
from services.gateway.openai.sampling_fields import Tokens
from services.gateway.openapi.only import EMPTY, only
from services.gateway.stops import checked_stops
from services.gateway.thinking import Reasoning, Switch, thought_budget


class ResponseFormat(Struct, frozen=True):
    type: Annotated[str, only("text")]


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Tokens | None = None
    """The later name of `max_tokens`; it wins."""

    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking: Switch | bool | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: str | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None

    prompt_cache_key_camel: str | None = field(default=None, name="promptCacheKey")
    """As OpenCode writes it."""

    logprobs: Annotated[bool, only(False)] | None = None
    top_logprobs: Annotated[int, only(0)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[Any, only(None, "auto", "none")] = None
    functions: Annotated[list[Any], EMPTY] | None = None
    response_format: ResponseFormat | None = None
    modalities: list[str] | None = None

    @property
    def sampling(self) -> SamplingWishes:
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        named = (self.thinking_budget, self.thinking_token_budget)
        return self.wishes(limit, thought_budget(self.thinking, self.reasoning, *named))

    @property
    def may_call(self) -> bool:
        return self.tool_choice != "none"


_decoder = msgspec.json.Decoder(ChatRequest)


def parse(body: bytes) -> ChatRequest:
    """Raises ApiError (400) that names the first field at fault."""
    request = decode(_decoder, body, roles="system, developer, user, assistant and tool")
    checked_stops(request.stops, "stop")
    _check_unsupported(request)
    return request


def _check_unsupported(request: ChatRequest) -> None:
    """Refuses what would change the meaning of the answer; all else that is unknown is ignored."""
    if request.n is not None and request.n != 1:
        raise unsupported("n", f"n: {request.n} answers were asked for; this server gives 1.")
    if request.logprobs or request.top_logprobs:
        field = "logprobs" if request.logprobs else "top_logprobs"
        raise unsupported(field, f"{field}: Log probabilities are not supported.")
    if request.functions:
        raise unsupported("functions", "functions: Not supported; send them as `tools`.")
    if request.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "tool_choice: Only `auto` and `none` are supported.")
    if request.response_format is not None and request.response_format.type != "text":
        raise unsupported(
            "response_format", f"response_format: `{request.response_format.type}` is not supported, only `text`."
        )
    if request.modalities is not None and "audio" in request.modalities:
        raise unsupported("modalities", "modalities: This model answers with text only.")
