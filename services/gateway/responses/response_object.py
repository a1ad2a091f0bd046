"""The response object of OpenAI's API: within the events of a stream, as a whole answer, and as it is stored."""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from services.gateway.errors import ApiError
from services.gateway.renderer import Cost
from services.gateway.responses.output_items import OutputItem
from services.gateway.responses.request import ResponsesRequest
from services.gateway.usage import SamovarUsage

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class Failure(Struct, frozen=True):
    code: str
    message: str

    @classmethod
    def of(cls, error: ApiError) -> "Failure":
        return cls(error.code or error.type, error.message)


class IncompleteDetails(Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class InputDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0
    """Nobody is billed for writes."""


class OutputDetails(Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True, kw_only=True):
    input_tokens: int
    """The whole prompt, cached tokens included."""
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    samovar: SamovarUsage

    @classmethod
    def of(cls, cost: Cost) -> "ResponseUsage":
        usage = cost.usage
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(usage.cached_tokens),
            output_tokens=usage.output_tokens,
            output_tokens_details=OutputDetails(cost.reasoning_tokens),
            total_tokens=usage.prompt_tokens + usage.output_tokens,
            samovar=SamovarUsage.of(cost),
        )


class ReasoningOptions(Struct, frozen=True):
    effort: str | None = None
    summary: None = None


class TextForm(Struct, frozen=True, tag="text"):
    pass


class TextSettings(Struct, frozen=True):
    format: TextForm = TextForm()


class ResponseObject(Struct, frozen=True, kw_only=True):
    """What the client asked for is told back as it came, null where it left the choice to the model."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Unix seconds."""
    completed_at: int | None = None
    status: ResponseStatus = "in_progress"
    background: bool = False
    error: Failure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: Sequence[OutputItem] = ()
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningOptions
    store: bool
    temperature: float | None
    text: TextSettings = TextSettings()
    tool_choice: Literal["auto", "none"]
    tools: Sequence[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None

    @classmethod
    def begun(cls, request: ResponsesRequest, id: str, model: str, created: int) -> "ResponseObject":
        """Before anything of the answer is there."""
        return cls(
            id=id,
            created_at=created,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            model=model,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=request.previous_response_id,
            prompt_cache_key=request.prompt_cache_key,
            reasoning=ReasoningOptions(request.reasoning.effort if request.reasoning else None),
            store=request.stored,
            temperature=request.temperature,
            tool_choice="auto" if request.may_call else "none",
            tools=request.tools or (),
            top_p=request.top_p,
            user=request.user,
        )
