"""The body of POST /v1/chat/completions: parsed and checked once, unknown fields ignored."""

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from services.gateway.errors import invalid, unsupported
from services.gateway.openai.messages import Message
from services.gateway.openai.thinking import Reasoning, Switch

MAX_STOPS = 16
MAX_STOP_CHARS = 1024

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
    def limit(self) -> int | None:
        """Output tokens that the client allows."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

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
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\[^u]"
)
"""A pair of surrogates, a single one (the group), or another escape, which may be that of a backslash."""
_PATH = re.compile(r"^(?P<what>.*?) - at (?:`key` in )?`\$\.?(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<field>\w+)`$")


def parse(body: bytes) -> ChatRequest:
    """Raises ApiError (400) that names the first field at fault."""
    try:
        request = _decode(body)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"The request body is not valid JSON: {error}", code="invalid_json") from None
    _check_stops(request)
    _check_unsupported(request)
    return request


def _decode(body: bytes) -> ChatRequest:
    """Agents cut texts at a number of UTF-16 units, which may leave half of a character, escaped. That is no Unicode
    and refused by the decoder, but it stays in the history and would end the conversation: U+FFFD takes its place."""
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        mended = _ESCAPE.sub(lambda escape: b"\\ufffd" if escape[1] else escape[0], body)
        if mended == body:
            raise
        return _decoder.decode(mended)


def _invalid_field(text: str) -> Exception:
    """msgspec's message with the field moved to the front and into `param`."""
    found = _PATH.match(text)
    what, path = (found["what"], found["path"]) if found else (text, "")
    missing = _MISSING.match(what)
    if missing:
        path = f"{path}.{missing['field']}" if path else missing["field"]
        what = "Field required"
    if path == "messages" and "length >= 1" in what:
        what = "An empty list: a chat needs at least one message"
    if path.endswith(".role") and what.startswith("Invalid enum value"):
        what += "; roles are system, developer, user, assistant and tool"
    return invalid(f"{path}: {what}." if path else f"The request body: {what}.", path or None)


def _check_stops(request: ChatRequest) -> None:
    stops = request.stops
    if len(stops) > MAX_STOPS:
        raise invalid(f"stop: {len(stops)} strings, at most {MAX_STOPS} are taken.", "stop")
    for stop in stops:
        if not stop:
            raise invalid("stop: An empty string would end every answer at once.", "stop")
        if len(stop) > MAX_STOP_CHARS:
            raise invalid(f"stop: A string of {len(stop)} characters, at most {MAX_STOP_CHARS} are taken.", "stop")


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
