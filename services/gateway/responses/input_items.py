"""The input of a Responses request: items, as clients send them, as they are stored, and as chat templates want them.

One turn of the assistant is several items here: its thoughts, its text and each of its calls. Items that stand
together become one message again, so that a history renders to the tokens of the same history in chat completions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from services.gateway.errors import invalid
from services.gateway.json_body import convert
from services.gateway.openai.messages import Message, Part, content_text, message_for_template
from services.gateway.openai.tools import Function, ToolCall, history_call
from services.gateway.responses.tools import CUSTOM_PARAMETER

Item = dict[str, Any]
Name = Annotated[str, Meta(min_length=1)]


class _MessageItem(Struct, frozen=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part] | None = None


class _ReasoningItem(Struct, frozen=True):
    content: list[Part] | None = None
    summary: list[Part] | None = None


class _CallItem(Struct, frozen=True):
    name: Name
    arguments: str | dict[str, Any] | None = None
    call_id: str | None = None


class _CustomCallItem(Struct, frozen=True):
    name: Name
    input: str = ""
    call_id: str | None = None


class _OutputItem(Struct, frozen=True):
    output: str | list[Part]
    call_id: str | None = None


def as_items(given: str | Sequence[Mapping[str, Any]] | None, request_id: str) -> list[Item]:
    """The input as items that can be listed: each with a type and an id, a message's content as parts."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}] if given else []
    return [_as_item(item, f"{request_id}_{place}") for place, item in enumerate(given or ())]


def _as_item(given: Mapping[str, Any], id: str) -> Item:
    item = {**given, "type": _kind(given)}
    if item["type"] == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        item["content"] = [{"type": part, "text": item["content"]}]
    if not isinstance(item.get("id"), str):
        item["id"] = f"item_{id}"
    return item


def for_template(instructions: str | None, items: Sequence[Mapping[str, Any]], first: int = 0) -> list[dict[str, Any]]:
    """The messages that a template renders. `instructions` and the system or developer messages in front are one
    system message, later ones stay where they are. Items of unknown types are left out, and calls that were cut, which
    nobody has answered. `first`: how many items in front are not of the request itself but of its history. Raises
    ApiError naming the item that cannot be used."""
    turns = _Turns()
    for place, item in enumerate(items):
        turns.add(item, f"input[{place - first}]")
    messages = turns.messages
    front = next((place for place, message in enumerate(messages) if message["role"] != "system"), len(messages))
    texts = [instructions or "", *(message["content"] for message in messages[:front])]
    system = "\n\n".join(text for text in texts if text)
    return [{"role": "system", "content": system}, *messages[front:]] if system else messages[front:]


class _Turns:
    """Puts items together to messages."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add(self, item: Mapping[str, Any], path: str) -> None:
        match _kind(item):
            case "function_call" | "custom_tool_call" if item.get("status") == "incomplete":
                pass
            case "message":
                self._message(convert(item, _MessageItem, path, roles="user, assistant, system and developer"), path)
            case "reasoning":
                self._reasoning(convert(item, _ReasoningItem, path))
            case "function_call":
                call = convert(item, _CallItem, path)
                self._call(ToolCall(Function(call.name, call.arguments), call.call_id), path)
            case "custom_tool_call":
                custom = convert(item, _CustomCallItem, path)
                self._call(ToolCall(Function(custom.name, {CUSTOM_PARAMETER: custom.input}), custom.call_id), path)
            case "function_call_output" | "custom_tool_call_output":
                self._output(convert(item, _OutputItem, path), path)
            case "item_reference":
                raise invalid(f"{path}: References to stored items are not supported; send the item itself.", path)

    def _message(self, item: _MessageItem, path: str) -> None:
        message = message_for_template(Message(role=item.role, content=item.content), path)
        if item.role == "assistant":
            turn = self._assistant(joins=lambda last: not last["content"] or "tool_calls" in last)
            turn["content"] += message["content"]
        else:
            self.messages.append(message)

    def _reasoning(self, item: _ReasoningItem) -> None:
        """A summary stands in for thoughts that were not sent. Thoughts that nobody can read are none."""
        thoughts = "".join([part.text or "" for part in item.content or item.summary or ()])
        if thoughts.strip():
            turn = self._assistant(joins=lambda last: not last["content"] and "tool_calls" not in last)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + thoughts

    def _call(self, call: ToolCall, path: str) -> None:
        turn = self._assistant(joins=lambda _: True)
        turn.setdefault("tool_calls", []).append(history_call(call, path))

    def _output(self, item: _OutputItem, path: str) -> None:
        result: dict[str, Any] = {"role": "tool", "content": content_text(item.output, f"{path}.output")}
        if item.call_id is not None:
            result["tool_call_id"] = item.call_id
        self.messages.append(result)

    def _assistant(self, joins: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The turn that an item of the assistant's belongs to: the open one if it `joins` that, else a new one."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or not joins(last):
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        return last


def _kind(item: Mapping[str, Any]) -> str:
    """An item without a type is a message, as in OpenAI's short form."""
    kind = item.get("type") or "message"
    return kind if isinstance(kind, str) else ""
