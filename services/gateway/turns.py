"""Which message a token of a rendered prompt lies in, told from where its turns begin."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.prompt.boundaries import TURN_OPENERS

_RESULT = "<tool_response>"
OPENING = -1
"""The number of what stands before all messages: declarations of tools, and the system text."""


@dataclass(frozen=True, slots=True)
class Place:
    message: int
    """Counted as in a chat's `messages`, system messages included; OPENING for what a template renders into the first
    turn."""
    role: str
    """`system`, `tools` or `tools and system` for the opening; else a message's own."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of one chat. Templates of the family render the tools and all system messages at the front as one
    turn, and tool results that follow each other as one of the user's; others render each result as a turn."""

    opener: int | None
    """The token that begins each turn; None where there is no such token, and for a raw prompt."""
    result: int | None = None
    """The token that begins each tool result within a turn."""
    roles: tuple[str, ...] = ()
    """Of the messages."""
    tools: bool = False
    """There are some."""

    @classmethod
    def of(
        cls, token_id: Callable[[str], int | None], messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
    ) -> "Turns":
        """`token_id`: the id of an added token by its text."""
        openers = (token_id(text) for text in TURN_OPENERS)
        return cls(
            next((id for id in openers if id is not None), None),
            token_id(_RESULT),
            tuple(message["role"] for message in messages),
            bool(tools),
        )

    def suffix(self, prompt: bytes) -> int:
        """Token position at which the last turn of a packed prompt begins; its length where it has no turns."""
        if self.opener is not None:
            mark, at = self.opener.to_bytes(4, "little"), len(prompt)
            while (at := prompt.rfind(mark, 0, at + 3)) > 0:
                if at % 4 == 0:
                    return at // 4
        return len(prompt) // 4

    def place(self, prompt: bytes, position: int) -> Place | None:
        """Of a token of a packed prompt. None behind all messages, and where the turns are not those of the messages
        (a template of another kind, or messages that write out the opening token)."""
        if self.opener is None:
            return None
        starts = list(_places(prompt, self.opener))
        turn = sum(start <= position for start in starts) - 1
        shapes = [self._expected(merged=True), self._expected(merged=False)]
        # Behind the messages stands the turn that is to be answered, but where the last message is to be gone on with.
        fitting = [shape for suffix in (1, 0) for shape in shapes if len(shape) + suffix == len(starts)]
        if not fitting or not 0 <= turn < len(fitting[0]):
            return None
        number, count = fitting[0][turn]
        if number == OPENING:
            return Place(OPENING, self._opening)
        if count > 1 and self.result is not None:
            results = _places(prompt, self.result, starts[turn], position + 1)
            number += min(max(sum(1 for _ in results) - 1, 0), count - 1)
        return Place(number, self.roles[number])

    @property
    def _front(self) -> int:
        """How many system messages stand at the front."""
        return next((place for place, role in enumerate(self.roles) if role != "system"), len(self.roles))

    @property
    def _opening(self) -> str:
        if not self.tools:
            return "system"
        return "tools and system" if self._front else "tools"

    def _expected(self, merged: bool) -> list[tuple[int, int]]:
        """For each turn its first message and how many it holds."""
        front = self._front
        turns = [(OPENING, front)] if front or self.tools else []
        for number in range(front, len(self.roles)):
            if merged and turns and self.roles[number] == "tool" == self.roles[number - 1] and number > front:
                turns[-1] = (turns[-1][0], turns[-1][1] + 1)
            else:
                turns.append((number, 1))
        return turns


def _places(prompt: bytes, token: int, start: int = 0, end: int | None = None) -> Iterator[int]:
    """Token positions of `token` in a packed prompt, from `start` up to but not including `end`."""
    mark = re.compile(re.escape(token.to_bytes(4, "little")))  # `bytes.find` takes three times as long
    at, stop = 4 * start, len(prompt) if end is None else 4 * end
    while (found := mark.search(prompt, at, stop)) is not None:
        at = found.start() + 1
        if found.start() % 4 == 0:
            yield found.start() // 4
