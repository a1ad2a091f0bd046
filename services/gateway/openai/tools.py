"""The tools of a chat request, and the calls in its history."""

import json
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from services.gateway.errors import invalid


class Function(Struct, frozen=True):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct, frozen=True):
    """A call in the history. Calls of another type than `function` are not in this API's history."""

    function: Function
    id: str | None = None


def function_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools that a model can call, each as it came, since its template prints it. Tools of other types (a
    provider's own web search, for one) are left out, as nobody would run them here. Raises ApiError."""
    found = []
    for place, tool in enumerate(tools):
        if tool.get("type", "function") != "function":
            continue
        path = f"tools[{place}].function"
        function = tool.get("function")
        if not isinstance(function, dict):
            raise invalid(f"{path}: Expected an object.", path)
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise invalid(f"{path}.name: Expected the function's name.", f"{path}.name")
        found.append(tool)
    return found


def history_call(call: ToolCall, path: str) -> dict[str, Any]:
    """As templates want it: the arguments as an object. Raises ApiError when the function has no name."""
    name = call.function.name
    if not name:
        raise invalid(f"{path}.function.name is missing.", f"{path}.function.name")
    plain: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": _object(call.function)}}
    return plain if call.id is None else {"id": call.id, **plain}


def _object(function: Function) -> dict[str, Any]:
    """A model's broken arguments come back in the history, where refusing them would end the conversation: they are
    shown as they are, under the name `arguments`."""
    arguments = function.arguments
    if isinstance(arguments, dict):
        return arguments
    if arguments is None or not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": value}
