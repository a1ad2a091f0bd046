"""Messages and their blocks, as Anthropic's clients send them and as chat templates want them."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from msgspec import Struct

from services.gateway.errors import invalid

_BETWEEN = "\n\n"
"""Between the texts of one message that is not the model's own."""


class Source(Struct, frozen=True):
    type: str = ""
    data: str | None = None


class Block(Struct, frozen=True, kw_only=True):
    """One of any type; each uses some of these fields."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: "str | list[Block] | None" = None
    is_error: bool | None = None
    source: Source | str | None = None


class MessageParam(Struct, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


def for_template(system: str | Sequence[Block] | None, messages: Sequence[MessageParam]) -> list[dict[str, Any]]:
    """In the one form that templates know (`conversation.Conversation.messages`), in order: a late system message
    stays where it is. Raises ApiError naming the block that cannot be used."""
    plain: list[dict[str, Any]] = []
    text = _system(system)
    if text:
        plain.append({"role": "system", "content": text})
    for place, message in enumerate(messages):
        path = f"messages[{place}].content"
        if message.role == "assistant":
            plain.append(_assistant(message.content, path))
        elif message.role == "user":
            plain += _user(message.content, path)
        else:
            plain.append({"role": "system", "content": _text(message.content, path)})
    return plain


def _system(system: str | Sequence[Block] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    return _BETWEEN.join(_block_text(block, f"system[{place}]") for place, block in enumerate(system))


def _user(content: str | Sequence[Block], path: str) -> Iterator[dict[str, Any]]:
    """Each result of a tool is a message of its own, as in the template; the texts between them are the user's."""
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    texts: list[str] = []
    for place, block in enumerate(content):
        here = f"{path}[{place}]"
        if block.type != "tool_result":
            texts.append(_block_text(block, here))
            continue
        if texts:
            yield {"role": "user", "content": _BETWEEN.join(texts)}
            texts = []
        yield _tool_result(block, here)
    if texts or not content:
        yield {"role": "user", "content": _BETWEEN.join(texts)}


def _tool_result(block: Block, path: str) -> dict[str, Any]:
    text = _text(block.content or "", f"{path}.content")
    # Templates have no place for the mark; most clients say it in the text too.
    if block.is_error and "error" not in text[:64].lower():
        text = f"Error: {text}"
    plain = {"role": "tool", "content": text}
    return plain if block.tool_use_id is None else {**plain, "tool_call_id": block.tool_use_id}


def _assistant(content: str | Sequence[Block], path: str) -> dict[str, Any]:
    blocks = [Block(type="text", text=content)] if isinstance(content, str) else content
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for place, block in enumerate(blocks):
        if block.type == "thinking":  # with whatever signature
            thoughts.append(block.thinking or "")
        elif block.type == "redacted_thinking":
            continue  # another server's thoughts, encrypted by it
        elif block.type == "tool_use":
            calls.append(_call(block, f"{path}[{place}]"))
        else:
            texts.append(_block_text(block, f"{path}[{place}]"))
    text = "".join(texts)
    plain: dict[str, Any] = {"role": "assistant", "content": text if text.strip() else ""}
    if thought := "".join(thoughts):
        plain["reasoning_content"] = thought
    if calls:
        plain["tool_calls"] = calls
    return plain


def _call(block: Block, path: str) -> dict[str, Any]:
    if not block.name:
        raise invalid(f"{path}.name is missing.", f"{path}.name")
    arguments = block.input if block.input is not None else {}
    if not isinstance(arguments, dict):
        raise invalid(f"{path}.input: Expected an object.", f"{path}.input")
    plain: dict[str, Any] = {"type": "function", "function": {"name": block.name, "arguments": arguments}}
    return plain if block.id is None else {"id": block.id, **plain}


def _text(content: str | Sequence[Block], path: str) -> str:
    if isinstance(content, str):
        return content
    return _BETWEEN.join(_block_text(block, f"{path}[{place}]") for place, block in enumerate(content))


def _block_text(block: Block, path: str) -> str:
    match block.type:
        case "text":
            if block.text is None:
                raise invalid(f"{path}.text is missing.", f"{path}.text")
            return block.text
        case "tool_reference":  # what a client's search for tools has found
            return block.tool_name or ""
        case "document" if isinstance(block.source, Source) and block.source.type == "text":
            return block.source.data or ""
        case "image" | "document":
            what = f"{path} is of type `{block.type}`, but this model reads text only."
            raise invalid(what, path, "unsupported_content")
        case _:
            raise invalid(f"{path} has the type `{block.type}`, which is not known at this place.", f"{path}.type")
