"""What a client asks for, whatever API it speaks: each family's adapter parses its body into these values, and from
here on nothing knows which family it was."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway.sessions.records import SessionHint


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A chat, to be rendered by the model's template."""

    messages: Sequence[Mapping[str, Any]]
    """In the one form that templates know: `role` (system, user, assistant, tool), `content` as one string; where there
    are any `reasoning_content`, `tool_calls` (each with its arguments as an object), `tool_call_id`, `name`."""
    tools: Sequence[Mapping[str, Any]] = ()
    """As templates know them: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """What the template gets beside messages and tools: see `openai.thinking.template_variables`."""
    may_call: bool = True
    """False: the tools stay in the prompt, and the model must not call them."""


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """A prompt that no template touches: a text, or token ids."""

    prompt: str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingWishes:
    """None is `not given`: then the model's own default counts. Each field is checked by its family's parser."""

    limit: int | None = None
    """Output tokens at most."""
    thoughts: int | None = None
    """Tokens of thoughts at most, what closes them included."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """-1 and 0 keep all."""
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request."""

    prompt: Conversation | RawPrompt
    model: str | None = None
    """None or empty: the main one."""
    sampling: SamplingWishes = SamplingWishes()
    stops: tuple[str, ...] = ()
    """Strings that end the answer; none is empty."""
    stream: bool = False
    session: SessionHint = field(default_factory=SessionHint)
    """What the client says about its session; `opening` is filled in later."""
    cache_salt: str = ""
