"""From the text of a tool call's parameters to JSON, by the types that the tool declares."""

import json
import re
from collections.abc import Mapping, Sequence
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
_KIND_OF = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


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

    def arguments(self, name: str, parameters: Mapping[str, str]) -> str:
        """A JSON object. A parameter of type string is its text; of another type the value that the text writes,
        in JSON or as Python does (`True`, `None`); what cannot be read as its type stays a string."""
        schema = self._schemas.get(name, {})
        properties = schema.get("properties")
        known = properties if isinstance(properties, dict) else {}
        values = {key: _value(text, known.get(key), schema) for key, text in parameters.items()}
        try:
            text = json.dumps(values, ensure_ascii=False)
            text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON can write and UTF-8 cannot
            return json.dumps(values)
        except RecursionError:
            return json.dumps(dict(parameters), ensure_ascii=False)
        return text


def _value(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    kinds = _kinds(schema, root)
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


def _json(text: str) -> Any:
    """None for what is no JSON."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
