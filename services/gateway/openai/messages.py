"""The messages of a chat, as OpenAI's clients send them and as chat templates want them."""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from services.gateway.errors import ApiError, invalid

Role = Literal["system", "developer", "user", "assistant", "tool"]

_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA_PARTS = ("image_url", "input_image", "image", "input_audio", "video_url", "file", "input_file")


class Part(Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None


class Message(Struct, frozen=True, kw_only=True):
    role: Role
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages in order, each with its content as one string, so that a part array and the same text as a string
    render alike. Raises ApiError naming the message that cannot be used."""
    return [_for_template(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _for_template(message: Message, path: str) -> dict[str, Any]:
    plain: dict[str, Any] = {
        # Templates know no `developer`; it is OpenAI's later name for the same thing.
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message, path),
    }
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        plain["tool_calls"] = message.tool_calls
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _text(message: Message, path: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":
            return ""
        raise invalid(f"{path}.content is missing: a {message.role} message needs text.", f"{path}.content")
    return "".join(_part(part, f"{path}.content[{place}]") for place, part in enumerate(content))


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
