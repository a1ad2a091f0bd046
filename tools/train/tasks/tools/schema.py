"""Tools and calls as they stand in a prompt."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tools.train.tasks.source import Source
from tools.train.tasks.wording import TOOLS_HEAD

Kind = Literal["string", "integer", "boolean", "array"]
"""JSON types; an array is one of strings."""


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    kind: Kind
    description: str = ""
    required: bool = True
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    parameters: tuple[Parameter, ...]

    def function(self) -> dict[str, Any]:
        """The JSON object under "function" of an OpenAI tool."""
        properties: dict[str, dict[str, Any]] = {}
        for parameter in self.parameters:
            entry: dict[str, Any] = {"type": parameter.kind}
            if parameter.description:
                entry["description"] = parameter.description
            if parameter.choices:
                entry["enum"] = list(parameter.choices)
            if parameter.kind == "array":
                entry["items"] = {"type": "string"}
            properties[parameter.name] = entry
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = {
            "type": "object",
            "properties": properties,
            "required": [parameter.name for parameter in self.parameters if parameter.required],
        }
        return function

    def json_line(self) -> str:
        return json.dumps({"type": "function", "function": self.function()}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Call:
    tool: str
    arguments: tuple[tuple[str, str], ...]
    """In the order of the tool's parameters; a string as it is, any other value as JSON."""

    def render(self) -> str:
        parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in self.arguments)
        return f"<tool_call>\n<function={self.tool}>\n{parameters}</function>\n</tool_call>"


def render_calls(calls: Sequence[Call]) -> str:
    return "\n".join(call.render() for call in calls)


def varied_json_line(source: Source, tool: Tool) -> str:
    """As different clients write the same tool: mostly the full object in OpenAI's order."""
    function = tool.function()
    form = source.rng.random()
    if form < 0.15:
        function["strict"] = True
    elif form < 0.3:
        function["parameters"]["additionalProperties"] = False
    wrapped = function if source.chance(0.15) else {"type": "function", "function": function}
    return json.dumps(wrapped, ensure_ascii=False, sort_keys=source.chance(0.1))


def tools_message(lines: Sequence[str], tail: str) -> str:
    """The system message's text of the tools."""
    return TOOLS_HEAD + "\n".join(lines) + tail
