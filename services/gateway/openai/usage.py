"""What an answer cost, as OpenAI's chats and completions report it."""

from msgspec import Struct

from services.gateway.renderer import Cost
from services.gateway.usage import SamovarUsage


class PromptDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionDetails(Struct, frozen=True):
    reasoning_tokens: int


class WholeUsage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    """The whole prompt, cached tokens included."""
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    samovar: SamovarUsage


def whole_usage(cost: Cost) -> WholeUsage:
    usage = cost.usage
    return WholeUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.output_tokens,
        total_tokens=usage.prompt_tokens + usage.output_tokens,
        prompt_tokens_details=PromptDetails(usage.cached_tokens),
        completion_tokens_details=CompletionDetails(cost.reasoning_tokens),
        samovar=SamovarUsage.of(cost),
    )
