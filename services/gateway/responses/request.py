"""The body of POST /v1/responses and of /v1/responses/input_tokens: parsed and checked once, unknown fields ignored."""

from typing import Annotated, Any

import msgspec
from msgspec import Struct

from services.gateway.conversation import SamplingWishes
from services.gateway.errors import invalid, unsupported
from services.gateway.json_body import decode
from services.gateway.openai.sampling_fields import SamplingFields, Tokens
from services.gateway.openapi.only import only
from services.gateway.thinking import Reasoning, Switch, thought_budget

MAX_METADATA = 16
"""Pairs, as in OpenAI's API; so are the next two, in characters."""
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512


class TextFormat(Struct, frozen=True):
    type: Annotated[str, only("text")] | None = None


class TextOptions(Struct, frozen=True):
    format: TextFormat | None = None


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True):
    """The sampling fields beyond `temperature` and `top_p` are not OpenAI's: they are those of chat completions."""

    input: str | list[dict[str, Any]] | None = None
    """A user's message, or items: see `input_items`."""
    instructions: str | None = None
    previous_response_id: str | None = None
    model: str | None = None
    stream: bool | None = None
    store: bool | None = None
    """Given or not, the response is stored unless this is false."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[Any, only(None, "auto", "none")] = None
    parallel_tool_calls: bool | None = None

    max_output_tokens: Tokens | None = None

    reasoning: Reasoning | None = None
    reasoning_effort: str | None = None
    thinking: Switch | bool | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    """Accepted and without effect: a prompt that is too long is refused, since agents shorten it better themselves."""
    user: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None

    background: Annotated[bool, only(False)] | None = None
    conversation: Annotated[Any, only(None)] = None
    prompt: Annotated[Any, only(None)] = None
    top_logprobs: Annotated[int, only(0)] | None = None

    @property
    def stored(self) -> bool:
        return self.store is not False

    @property
    def sampling(self) -> SamplingWishes:
        return self.wishes(self.max_output_tokens, thought_budget(self.thinking, self.reasoning))

    @property
    def may_call(self) -> bool:
        return self.tool_choice != "none"


_decoder = msgspec.json.Decoder(ResponsesRequest)


def parse(body: bytes) -> ResponsesRequest:
    """Raises ApiError (400) that names the first field at fault."""
    request = decode(_decoder, body)
    _check_unsupported(request)
    _check_metadata(request.metadata or {})
    return request


def _check_unsupported(request: ResponsesRequest) -> None:
    """Refuses what would change the meaning of the answer; all else that is unknown is ignored."""
    if request.background:
        raise unsupported("background", "background: Not supported; ask with `stream` and keep the connection open.")
    if request.conversation is not None:
        raise unsupported("conversation", "conversation: Not supported; use `previous_response_id`, or send all items.")
    if request.prompt is not None:
        raise unsupported("prompt", "prompt: This server keeps no prompt templates; send `instructions` and `input`.")
    if request.top_logprobs:
        raise unsupported("top_logprobs", "top_logprobs: Log probabilities are not supported.")
    if request.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "tool_choice: Only `auto` and `none` are supported.")
    form = request.text.format.type if request.text and request.text.format else None
    if form not in (None, "text"):
        raise unsupported("text.format", f"text.format: `{form}` is not supported, only `text`.")


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise invalid(f"metadata: {len(metadata)} pairs, at most {MAX_METADATA} are taken.", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise invalid(
                f"metadata: Keys have {MAX_METADATA_KEY} characters at most, values {MAX_METADATA_VALUE}.", "metadata"
            )
