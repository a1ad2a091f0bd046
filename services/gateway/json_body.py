"""From a body's bytes to a request struct, with errors that name the field at fault."""

import re
from typing import TypeVar

import msgspec

from services.gateway.errors import ApiError, invalid

T = TypeVar("T")

_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\[^u]"
)
"""A pair of surrogates, a single one (the group), or another escape, which may be that of a backslash."""
_PATH = re.compile(r"^(?P<what>.*?) - at (?:`key` in )?`\$\.?(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<field>\w+)`$")


def decode(decoder: msgspec.json.Decoder[T], body: bytes, *, roles: str = "") -> T:
    """Raises ApiError (400) that names the first field at fault. `roles`: those of a message, for the error about an
    unknown one."""
    try:
        return _decode(decoder, body)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error), roles) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"The request body is not valid JSON: {error}", code="invalid_json") from None


def convert(value: object, type: type[T], path: str, *, roles: str = "") -> T:
    """A part of a body, at `path`, that was decoded without its type. Raises ApiError as `decode` does."""
    try:
        return msgspec.convert(value, type)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error), roles, path) from None


def _decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Agents cut texts at a number of UTF-16 units, which may leave half of a character, escaped. That is no Unicode
    and refused by the decoder, but it stays in the history and would end the conversation: U+FFFD takes its place."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        mended = _ESCAPE.sub(lambda escape: b"\\ufffd" if escape[1] else escape[0], body)
        if mended == body:
            raise
        return decoder.decode(mended)


def _invalid_field(text: str, roles: str, under: str = "") -> ApiError:
    """msgspec's message with the field moved to the front and into `param`. `under`: where the value lies."""
    found = _PATH.match(text)
    what, path = (found["what"], found["path"]) if found else (text, "")
    path = f"{under}{'' if path.startswith('[') or not path or not under else '.'}{path}"
    missing = _MISSING.match(what)
    if missing:
        path = f"{path}.{missing['field']}" if path else missing["field"]
        what = "Field required"
    if path == "messages" and "length >= 1" in what:
        what = "An empty list: a chat needs at least one message"
    if roles and path.endswith(".role") and what.startswith("Invalid enum value"):
        what += f"; roles are {roles}"
    return invalid(f"{path}: {what}." if path else f"The request body: {what}.", path or None)
