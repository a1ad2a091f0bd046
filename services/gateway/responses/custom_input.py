"""The text of a custom tool's call, out of the JSON arguments that the model's call becomes."""

import json
import re

from services.gateway.responses.tools import CUSTOM_PARAMETER

_OPENING = re.compile(rf'\s*\{{\s*"{CUSTOM_PARAMETER}"\s*:\s*"')
_WHOLE = re.compile(
    r'(?:[^"\\]++'
    r'|\\["\\/bfnrt]'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])"
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    r")*+",
    re.DOTALL,
)
"""Characters of a JSON string that are complete, whatever follows: half of a surrogate pair waits for the other."""


class CustomInput:
    """Arguments in, text out, in fragments: the same text whatever the cut."""

    def __init__(self) -> None:
        self._held = ""
        """Not given out yet."""
        self._opened = False
        """The parameter was found; what is held is of its value."""
        self._given: list[str] = []

    @property
    def text(self) -> str:
        """All that was given out."""
        return "".join(self._given)

    def feed(self, arguments: str) -> str:
        self._held += arguments
        if not self._opened:
            opening = _OPENING.match(self._held)
            if opening is None:
                return ""
            self._opened = True
            self._held = self._held[opening.end() :]
        whole = _WHOLE.match(self._held)
        if whole is None or not whole[0]:
            return ""
        self._held = self._held[whole.end() :]
        return self._give(json.loads(f'"{whole[0]}"', strict=False))

    def finish(self) -> str:
        """The rest. A call that does not have the parameter is given as what it has: its only string, or as JSON."""
        return "" if self._opened else self._give(_otherwise(self._held))

    def _give(self, text: str) -> str:
        # JSON can write half of a surrogate pair, and UTF-8 cannot.
        text = text.encode("utf-8", "replace").decode()
        if text:
            self._given.append(text)
        return text


def _otherwise(arguments: str) -> str:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    values = list(value.values()) if isinstance(value, dict) else []
    if not values:
        return ""
    return values[0] if len(values) == 1 and isinstance(values[0], str) else arguments
