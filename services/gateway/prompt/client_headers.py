"""Lines that clients put in front of system text for a server's own books. They may change with every request, and
are meant for no model: in a prompt they would cost its whole cache."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_HEADER = re.compile(r"\s*x-anthropic-billing-header:[ \t]*(?:[\w.-]+=[^;\n]*(?:;|(?=\n)|\Z)[ \t]*)*")
"""Claude Code's: `x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;`."""


def without_headers(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same messages without such a line at the beginning of the system messages at the front; one that has
    nothing else goes."""
    front = next((place for place, message in enumerate(messages) if message["role"] != "system"), len(messages))
    stripped = [_without_header(message) for message in messages[:front]]
    return [*(message for message in stripped if message is not None), *messages[front:]]


def _without_header(message: Mapping[str, Any]) -> Mapping[str, Any] | None:
    header = _HEADER.match(message["content"])
    if header is None:
        return message
    rest = message["content"][header.end() :].lstrip("\r\n")
    return {**message, "content": rest} if rest else None
