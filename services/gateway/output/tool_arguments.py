"""From the text of a tool call's parameters to JSON, by the types that the tool declares."""

import json
import re
from collections.abc import Mapping, Sequence, Set
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]{1,4})?")
_STRICT_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,4})?")
_LARGEST_EXPONENT = 308
_DIGITS = 4000
"""Python refuses to turn longer ones into an integer."""
_NESTED = 16
"""Schemas within schemas, and references that go round."""
_NULLS = ("null", "None")
_BOOLEANS = {"true": True, "false": False}
_WORDS = (("null", "null"), ("boolean", "true"), ("boolean", "false"))
_STREAMED = frozenset({"string", "null", "boolean"})
_KIND_OF = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


class Tools:
    """The tools that a request declares, as OpenAI's `{"type": "function", "function": {...}}`. Immutable."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            schema = tool["function"].get("parameters")
            self._schemas[tool["function"]["name"]] = schema if isinstance(schema, dict) else {}

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def __len__(self) -> int:
        return len(self._schemas)

    def parameter(self, tool: str, name: str) -> "Parameter":
        """Of a tool or a name that is not declared: one of which nothing is known."""
        return Parameter(_kinds(self._properties(tool).get(name), self._schemas.get(tool, {})))

    def has_parameter(self, tool: str, name: str) -> bool:
        return name in self._properties(tool)

    def _properties(self, tool: str) -> Mapping[str, Any]:
        properties = self._schemas.get(tool, {}).get("properties")
        return properties if isinstance(properties, dict) else {}


class Parameter:
    """From the text of one parameter to its value. One of type string is its text; one of another type is the value
    that the text writes, in JSON or as Python does (`True`, `None`); what cannot be read as its type is a string."""

    __slots__ = ("_kinds", "_words", "streams")

    def __init__(self, kinds: Set[str]) -> None:
        """`kinds`: the JSON types that the schema allows; empty where it says nothing."""
        self._kinds = kinds
        self.streams = "string" in kinds and kinds <= _STREAMED
        """A text's beginning may tell that it is a string."""
        self._words = [word for kind, word in _WORDS if kind in kinds]

    def is_string(self, beginning: str) -> bool:
        """Whether a text that begins so is a string however it goes on, if it `streams`: where null or booleans are
        allowed too, not while the text may become one of their words."""
        if not self._words:
            return True
        start = beginning.strip()
        return not any(word.startswith(start) for word in self._words)

    def json(self, text: str) -> str:
        value = _value(text, self._kinds)
        written = value_json(value)
        return to_json(text) if written is None else written


def to_json(text: str) -> str:
    """A JSON string."""
    return _encode(text)


def value_json(value: Any) -> str | None:
    """JSON that UTF-8 can hold; None for what is nested too deep, or holds a number too large."""
    try:
        text = _encode(value)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can write and UTF-8 cannot
        return json.dumps(value)
    except (ValueError, RecursionError):
        return None
    return text


def json_object(text: str) -> dict[str, Any] | None:
    """None for what is no JSON object. Line breaks within strings are read as they are meant."""
    value = _json(text.strip(), strict=False) if text else None
    return value if isinstance(value, dict) else None


def _value(text: str, kinds: Set[str]) -> Any:
    if kinds == {"string"}:
        return text
    word = text.strip()
    # Where a string is allowed too, or nothing is said, only what is exactly JSON is more than a string.
    strict = not kinds or "string" in kinds
    kinds = kinds - {"string"} or {"null", "boolean", "number", "array", "object"}
    if "null" in kinds and (word == "null" or (word in _NULLS and not strict)):
        return None
    if "boolean" in kinds and (word if strict else word.lower()) in _BOOLEANS:
        return _BOOLEANS[word.lower()]
    if kinds & {"integer", "number"}:
        number = _number(word, whole="number" not in kinds, strict=strict)
        if number is not None:
            return number
    if kinds & {"array", "object"} and word[:1] in ("[", "{"):
        value = _json(word)
        if (isinstance(value, list) and "array" in kinds) or (isinstance(value, dict) and "object" in kinds):
            return value
    return text


def _kinds(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The JSON types that a schema allows, unions and references unwrapped; empty where it says nothing."""
    if not isinstance(schema, dict) or depth > _NESTED:
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {kind for kind in declared if isinstance(kind, str)}
    kinds: set[str] = set()
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            kinds |= _kinds(option, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        kinds |= _kinds(_referred(reference, root), root, depth + 1)
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else ()
    kinds |= {_KIND_OF.get(type(value), "object") for value in values}
    if "properties" in schema:
        kinds.add("object")
    if "items" in schema:
        kinds.add("array")
    return kinds


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """`#/$defs/Name` within the tool's own schema."""
    found: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _number(word: str, whole: bool, strict: bool) -> int | float | None:
    """Integers never pass through a float; `5.0` is one too. None for what is no number, or too large for JSON."""
    if len(word) > _DIGITS or not (_STRICT_NUMBER if strict else _NUMBER).fullmatch(word):
        return None
    if word.lstrip("+-").isdigit():
        return int(word)
    exact = Decimal(word)
    if exact.adjusted() > _LARGEST_EXPONENT:
        return None
    if whole:
        return int(exact) if exact == exact.to_integral_value() else None
    return float(exact)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _json(text: str, strict: bool = True) -> Any:
    """None for what is no JSON."""
    try:
        return json.loads(text, strict=strict, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
