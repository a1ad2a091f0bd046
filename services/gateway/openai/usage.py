"""What an answer cost, as OpenAI's chats and completions report it."""

from msgspec import Struct

from services.gateway.renderer import Cost


class PromptDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionDetails(Struct, frozen=True):
    reasoning_tokens: int


class SamovarUsage(Struct, frozen=True, kw_only=True):
    """What OpenAI's fields have no place for. Seconds and tokens as in `protocol.generate.Usage`."""

    cached_device: int
    cached_host: int
    computed_tokens: int
    preemptions: int
    queue_seconds: float
    restore_seconds: float
    prefill_seconds: float
    decode_seconds: float


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
        samovar=SamovarUsage(
            cached_device=usage.cached_device,
            cached_host=usage.cached_host,
            computed_tokens=usage.computed_tokens,
            preemptions=usage.preemptions,
            queue_seconds=round(usage.queue_seconds, 6),
            restore_seconds=round(usage.restore_seconds, 6),
            prefill_seconds=round(usage.prefill_seconds, 6),
            decode_seconds=round(usage.decode_seconds, 6),
        ),
    )
