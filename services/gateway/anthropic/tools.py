"""The tools of Anthropic's API, as chat templates know tools."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from services.gateway.errors import invalid


class Tool(Struct, frozen=True):
    name: str | None = None
    type: str | None = None
    """None or `custom`: the client runs it. Other types are tools that Anthropic's servers would run."""
    description: str | None = None
    input_schema: dict[str, Any] | None = None


def function_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools that a model can call. Those of other types are left out, as nobody would run them here. Raises
    ApiError for one without a name."""
    found = []
    for place, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            continue
        if not tool.name:
            raise invalid(f"tools[{place}].name: Expected the tool's name.", f"tools[{place}].name")
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
        found.append({"type": "function", "function": function})
    return found
