"""The tools of a Responses request, in the form that chat templates print.

A `function` tool is flat here. A `custom` tool takes free text; for the model it is a function with the one string
parameter `input`, and its call is given back as text again (`custom_input`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.gateway.errors import invalid

CUSTOM_PARAMETER = "input"

_CUSTOM_SCHEMA = {
    "type": "object",
    "properties": {CUSTOM_PARAMETER: {"type": "string", "description": "The whole input of the tool, as plain text."}},
    "required": [CUSTOM_PARAMETER],
}


def for_template(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools that a model can call, as chat completions would be sent them. Tools of other types (a provider's own
    web search, namespaces) are left out, as nobody would run them here. Raises ApiError."""
    found: list[dict[str, Any]] = []
    for place, tool in enumerate(tools):
        path = f"tools[{place}]"
        match tool.get("type"):
            case "function":
                given = {key: tool[key] for key in ("description", "parameters") if tool.get(key) is not None}
            case "custom":
                given = {"description": _custom_description(tool), "parameters": _CUSTOM_SCHEMA}
            case _:
                continue
        found.append({"type": "function", "function": {"name": _name(tool, path), **given}})
    return found


def custom_names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The names whose calls are `custom_tool_call` items."""
    return frozenset(_names(tools, "custom")) - frozenset(_names(tools, "function"))


def _names(tools: Sequence[Mapping[str, Any]], kind: str) -> Iterator[str]:
    return (tool["name"] for tool in tools if tool.get("type") == kind)


def _name(tool: Mapping[str, Any], path: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise invalid(f"{path}.name: Expected the tool's name.", f"{path}.name")
    return name


def _custom_description(tool: Mapping[str, Any]) -> str:
    """With the grammar, which no engine enforces here: to know it is the model's only way to keep to it."""
    parts = [tool.get("description")]
    form = tool.get("format")
    if isinstance(form, dict) and isinstance(form.get("definition"), str):
        parts.append(f"The input follows this {form.get('syntax') or ''} grammar:\n{form['definition']}")
    return "\n\n".join(part for part in parts if isinstance(part, str) and part)
