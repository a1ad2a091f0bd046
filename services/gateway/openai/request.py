"""The body of POST /v1/chat/completions: parsed and checked once, unknown fields ignored."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from services.gateway.conversation import SamplingWishes
from services.gateway.errors import unsupported
from services.gateway.json_body import decode
from services.gateway.openai.messages import Message
from services.gateway.stops import checked_stops
from services.gateway.thinking import Reasoning, Switch

NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Tokens = Annotated[int, Meta(ge=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class ResponseFormat(Struct, frozen=True):
    type: str


class ChatRequest(Struct, frozen=True, kw_only=True):
    """None everywhere means `not given`: many clients send null for that."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    """The later name of the same limit; it wins."""
    stop: str | list[str] | None = None
    temperature: NotNegative | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """-1 and 0 keep all."""
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: dict[int, Bias] | None = None
    seed: Seed | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking: Switch | bool | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: str | None = None

    user: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_key_camel: str | None = field(default=None, name="promptCacheKey")
    """As OpenCode writes it."""
    cache_salt: str | None = None

    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    response_format: ResponseFormat | None = None
    modalities: list[str] | None = None

    @property
    def sampling(self) -> SamplingWishes:
        return SamplingWishes(
            limit=self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
        )

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def may_call(self) -> bool:
        return self.tool_choice != "none"

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


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
