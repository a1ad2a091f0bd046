"""The body of POST /v1/completions: parsed and checked once, unknown fields ignored."""

from typing import Annotated, Any

import msgspec

from services.gateway.conversation import RawPrompt, SamplingWishes
from services.gateway.errors import invalid, unsupported
from services.gateway.json_body import decode
from services.gateway.openai.generation_request import GenerationRequest
from services.gateway.openapi.only import only
from services.gateway.stops import checked_stops

DEFAULT_LIMIT = 16
"""Output tokens without a `max_tokens`, as this API defines it: a raw prompt seldom makes a model stop by itself."""


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    prompt: str | list[Any]
    """A text, token ids, or a list with one of these."""

    best_of: Annotated[int, only(1)] | None = None
    echo: Annotated[bool, only(False)] | None = None
    logprobs: int | None = None
    suffix: Annotated[str, only("")] | None = None

    @property
    def sampling(self) -> SamplingWishes:
        return self.wishes(self.max_tokens or DEFAULT_LIMIT)


_decoder = msgspec.json.Decoder(CompletionRequest)


def parse(body: bytes) -> CompletionRequest:
    """Raises ApiError (400) that names the first field at fault."""
    request = decode(_decoder, body)
    checked_stops(request.stops, "stop")
    for field, value in (("n", request.n), ("best_of", request.best_of)):
        if value is not None and value != 1:
            raise unsupported(field, f"{field}: {value} answers were asked for; this server gives 1.")
    if request.echo:
        raise unsupported("echo", "echo: The prompt is not repeated in the answer.")
    if request.logprobs is not None:
        raise unsupported("logprobs", "logprobs: Log probabilities are not supported.")
    if request.suffix:
        raise unsupported("suffix", "suffix: Filling in between two texts is not supported.")
    return request


def raw_prompt(prompt: str | list[Any], vocab_size: int) -> RawPrompt:
    """Raises ApiError for what is no prompt, for several, and for ids that the model does not have."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise unsupported("prompt", f"prompt: {len(prompt)} prompts; this server takes one a request.")
        prompt = prompt[0]
    if isinstance(prompt, str):
        if not prompt:
            raise invalid("prompt: An empty text.", "prompt")
        return RawPrompt(prompt)
    return RawPrompt(checked_ids(prompt, vocab_size, "prompt"))


def checked_ids(ids: list[Any], vocab_size: int, field: str) -> list[int]:
    """Raises ApiError unless these are ids of the model's tokens, at least one."""
    if not ids:
        raise invalid(f"{field}: An empty list.", field)
    for place, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool):
            raise invalid(f"{field}[{place}]: Expected a token id.", f"{field}[{place}]")
        if not 0 <= token < vocab_size:
            what = f"{field}[{place}]: The model has no token {token}; ids go to {vocab_size - 1}."
            raise invalid(what, f"{field}[{place}]")
    return ids
