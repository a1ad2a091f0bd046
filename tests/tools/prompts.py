"""Reads prompts and answers back, independently of the code that wrote them."""

import json
import re
from typing import Any


def turns(text: str) -> list[tuple[str, str]]:
    """(role, content) of each ChatML turn; the last one may be open."""
    return re.findall(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", text, re.DOTALL)


def tools_of(system: str) -> dict[str, dict[str, Any]]:
    """The functions of a system message, by name."""
    lines = system.split("<tools>\n")[1].split("\n</tools>")[0].split("\n")
    functions = [json.loads(line) for line in lines]
    functions = [function.get("function", function) for function in functions]
    found = {function["name"]: function for function in functions}
    assert len(found) == len(functions), "two tools of one name"
    return found


def calls_of(answer: str) -> list[tuple[str, dict[str, str]]]:
    """(name, arguments); the answer must be nothing but calls."""
    blocks = answer.split("\n<tool_call>\n")
    blocks[0] = blocks[0].removeprefix("<tool_call>\n")
    calls: list[tuple[str, dict[str, str]]] = []
    for block in blocks:
        match = re.fullmatch(r"<function=([^>\n]+)>\n(.*)</function>\n</tool_call>", block, re.DOTALL)
        assert match, block
        name, body = match.groups()
        arguments: dict[str, str] = {}
        while body:
            parameter = re.match(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>\n", body, re.DOTALL)
            assert parameter, body
            assert parameter[1] not in arguments
            arguments[parameter[1]] = parameter[2]
            body = body[parameter.end() :]
        calls.append((name, arguments))
    return calls


NUMBER_WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)


def check_calls(tools: dict[str, dict[str, Any]], user: str, answer: str) -> None:
    """Every call fits its schema, and every argument follows from what the user says."""
    for name, arguments in calls_of(answer):
        schema = tools[name]["parameters"]
        properties = schema["properties"]
        assert set(schema["required"]) <= set(arguments) <= set(properties), (name, arguments)
        for key, value in arguments.items():
            kind = properties[key]["type"]
            if kind == "boolean":
                assert value in ("true", "false")
            elif kind == "integer":
                number = int(value)
                said = value in user or (number < len(NUMBER_WORDS) and NUMBER_WORDS[number] in user.lower())
                assert said, (value, user)
            elif kind == "array":
                items = json.loads(value)
                assert len(items) >= 2
                assert all(item in user for item in items)
            else:
                assert kind == "string"
                assert value
                assert value in user, (value, user)
            if "enum" in properties[key]:
                assert value in properties[key]["enum"]
