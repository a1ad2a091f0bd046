"""The messages of a chat, as OpenAI's clients send them and as chat templates want them."""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from services.gateway.errors import ApiError, invalid
from services.gateway.openai.tools import ToolCall, history_call

Role = Literal["system", "developer", "user", "assistant", "tool"]

_THOUGHT_PARTS = ("thinking", "reasoning", "reasoning_text", "redacted_thinking")
_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA_PARTS = ("image_url", "input_image", "image", "input_audio", "video_url", "file", "input_file")


class Part(Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None
    thinking: str | None = None
    """The text of a part of type `thinking`."""


class Message(Struct, frozen=True, kw_only=True):
    role: Role
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """The thoughts of an assistant's message; the next two are other clients' names for them."""
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages in order, in the one form that templates know: what clients may write in several ways renders
    alike. Content is one string (a part array is its texts, an assistant's blank content is none), thoughts are
    `reasoning_content`, a call's arguments are an object. Raises ApiError naming the message that cannot be used."""
    return [message_for_template(message, f"messages[{place}]") for place, message in enumerate(messages)]


def message_for_template(message: Message, path: str) -> dict[str, Any]:
    """One of `for_template`; `path` is its place in the request."""
    plain: dict[str, Any] = {
        # Templates know no `developer`; it is OpenAI's later name for the same thing.
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message, f"{path}.content"),
    }
    if message.name is not None:
        plain["name"] = message.name
    if message.role == "assistant":
        # Clients that keep no empty content send a space instead.
        plain["content"] = plain["content"] if plain["content"].strip() else ""
        thoughts = _thoughts(message)
        if thoughts:
            plain["reasoning_content"] = thoughts
        if message.tool_calls:
            calls = enumerate(message.tool_calls)
            plain["tool_calls"] = [history_call(call, f"{path}.tool_calls[{place}]") for place, call in calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _thoughts(message: Message) -> str:
    for text in (message.reasoning_content, message.reasoning, message.thinking):
        if text and text.strip():
            return text
    parts = message.content if isinstance(message.content, list) else ()
    return "".join(part.thinking or part.text or "" for part in parts if part.type in _THOUGHT_PARTS)


def content_text(content: str | Sequence[Part], path: str) -> str:
    """A content as one string. Raises ApiError for a part that is no text; `path` is the content's."""
    if isinstance(content, str):
        return content
    return "".join(_part(part, f"{path}[{place}]") for place, part in enumerate(content))


def _text(message: Message, path: str) -> str:
    content = message.content
    if content is None:
        if message.role == "assistant":
            return ""
        raise invalid(f"{path} is missing: a {message.role} message needs text.", path)
    if message.role != "assistant" or isinstance(content, str):
        return content_text(content, path)
    texts = [(place, part) for place, part in enumerate(content) if part.type not in _THOUGHT_PARTS]
    return "".join(_part(part, f"{path}[{place}]") for place, part in texts)


def _part(part: Part, path: str) -> str:
    if part.type in _TEXT_PARTS:
        if part.text is None:
            raise invalid(f"{path}.text is missing.", f"{path}.text")
        return part.text
    raise _no_media(part.type, path)


def _no_media(kind: str, path: str) -> ApiError:
    if kind in _MEDIA_PARTS:
        return invalid(f"{path} is of type `{kind}`, but this model reads text only.", path, "unsupported_content")
    return invalid(f"{path} has the unknown type `{kind}`; this server reads `text` parts.", f"{path}.type")
