"""How a template writes a call that has one argument, known from a probe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.output.structure import CLOSE_CALL, OPEN_CALL

_NAME, _MARK = "a-probed-function", "a-probed-argument"


def one_argument(name: str, value: str) -> dict[str, Any]:
    """A call's function, as templates know it, with `value` as its only argument."""
    return {"name": name, "arguments": {"raw": value}}


PROBE: Sequence[Mapping[str, Any]] = (
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_0", "type": "function", "function": one_argument(_NAME, _MARK)}],
    },
    {"role": "tool", "content": "b", "tool_call_id": "call_0"},
)
"""Its rendering is for `CallFrame.of`."""


@dataclass(frozen=True, slots=True)
class CallFrame:
    """What a template writes around the name of a call and around its one argument."""

    head: str
    middle: str
    tail: str

    @classmethod
    def of(cls, probe: str) -> "CallFrame | None":
        """None where the probe's call does not stand, once, between the tags of calls."""
        before, _, behind = probe.partition(_MARK)
        start, end = before.rfind(OPEN_CALL), behind.find(CLOSE_CALL)
        if start < 0 or end < 0 or _MARK in behind:
            return None
        head, name, middle = before[start:].partition(_NAME)
        if not name or _NAME in middle:
            return None
        return cls(head, middle, behind[: end + len(CLOSE_CALL)])

    def call(self, name: str, value: str) -> str:
        """As the template writes `one_argument`."""
        return self.head + name + self.middle + value + self.tail
