"""What requests for a chat and for a completion have in common."""

from typing import Annotated

from msgspec import Struct

from services.gateway.openai.sampling_fields import SamplingFields, Tokens
from services.gateway.openapi.only import only


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class GenerationRequest(SamplingFields, frozen=True, kw_only=True):
    """Part of a request's body."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    stop: str | list[str] | None = None

    user: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None

    n: Annotated[int, only(1)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)
