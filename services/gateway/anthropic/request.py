"""The body of POST /v1/messages and of its count_tokens: parsed and checked once, unknown fields ignored."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from services.gateway.anthropic.content import Block, MessageParam
from services.gateway.anthropic.tools import Tool
from services.gateway.conversation import SamplingWishes
from services.gateway.errors import unsupported
from services.gateway.json_body import decode
from services.gateway.openapi.only import EMPTY, only
from services.gateway.stops import checked_stops
from services.gateway.thinking import ENABLE, Reasoning, Switch, template_variables, thought_budget


class ToolChoice(Struct, frozen=True):
    type: Annotated[str, only("auto", "none")]


class Metadata(Struct, frozen=True):
    user_id: str | None = None


class OutputConfig(Struct, frozen=True):
    effort: str | None = None
    format: Annotated[Any, only(None)] = None


class MessagesRequest(Struct, frozen=True, kw_only=True):
    """None everywhere means `not given`. `cache_control` may stand anywhere: every prefix is cached without it."""

    messages: Annotated[list[MessageParam], Meta(min_length=1)]
    model: str | None = None
    system: str | list[Block] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Anthropic demands it; here it may be left out."""
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Switch | None = None
    """`enabled`, `adaptive` or `disabled`. Its `display` is taken and changes nothing."""
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None
    mcp_servers: Annotated[list[Any], EMPTY] | None = None
    output_format: Annotated[Any, only(None)] = None

    chat_template_kwargs: dict[str, Any] | None = None
    """Not Anthropic's: as in the chat API, for the model's template."""
    cache_salt: str | None = None
    """Not Anthropic's: as in the chat API."""

    @property
    def enable_thinking(self) -> bool | None:
        return None

    @property
    def reasoning(self) -> Reasoning | None:
        return None

    @property
    def reasoning_effort(self) -> str | None:
        """An effort alone asks for no thoughts here: it is one for the whole answer."""
        return self.output_config.effort if self.output_config is not None and self.thinking is not None else None

    @property
    def variables(self) -> dict[str, Any]:
        """What the template gets. In this API a model thinks only where it is told to. Raises ApiError."""
        return {ENABLE: False, **template_variables(self)}

    @property
    def sampling(self) -> SamplingWishes:
        return SamplingWishes(
            limit=self.max_tokens,
            thoughts=thought_budget(self.thinking),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
        )

    @property
    def may_call(self) -> bool:
        return self.tool_choice is None or self.tool_choice.type != "none"


_decoder = msgspec.json.Decoder(MessagesRequest)


def parse(body: bytes) -> MessagesRequest:
    """Raises ApiError (400) that names the first field at fault."""
    request = decode(_decoder, body, roles="user, assistant and system")
    checked_stops(request.stop_sequences or (), "stop_sequences")
    _check_unsupported(request)
    return request


def _check_unsupported(request: MessagesRequest) -> None:
    """Refuses what would change the meaning of the answer; all else that is unknown is ignored."""
    if request.tool_choice is not None and request.tool_choice.type not in ("auto", "none"):
        raise unsupported(
            "tool_choice", f"tool_choice: `{request.tool_choice.type}` is not supported, only `auto` and `none`."
        )
    if request.mcp_servers:
        raise unsupported("mcp_servers", "mcp_servers: This server calls no other servers.")
    if request.output_format is not None:
        raise unsupported("output_format", "output_format: Only plain text is supported.")
    if request.output_config is not None and request.output_config.format is not None:
        raise unsupported("output_config.format", "output_config.format: Only plain text is supported.")
