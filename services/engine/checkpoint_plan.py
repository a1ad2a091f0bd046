"""Where a prefill stops to take a checkpoint of its recurrent state."""

from collections.abc import Sequence

ROLL = 16
"""Tokens between the states that a decode leaves behind itself for a client that hangs up: what it has read ends a few
tokens before what was run, and goes on from there when it comes back as history. A copy of the 27B's state takes an
H200 70 us, and 16 steps 100 ms."""
ROLLING = 2
"""Of them, kept behind a request."""
MOST_HINTS = 4
"""Hinted positions a request at most, besides its first one and its last one."""


def checkpoint_positions(
    hints: Sequence[int], prompt: int, end: int, start: int, interval: int, gap: int
) -> tuple[int, ...]:
    """Positions in (start, end] of a context of `end` tokens, the first `prompt` of which are the prompt, ascending.

    A checkpoint costs a slot, a copy and a chunk that ends there, so not every hint gets one. In order of preference:

    * the prompt's end (an exact repeat, another sample);
    * the last hint, which stands before the generation suffix (a next turn that renders the answer otherwise);
    * the first hint, behind system text and tools (another conversation);
    * further hints, the deepest first: the latest messages are what an edit or a compaction leaves;
    * multiples of `interval` (an abort in a long prefill, an edit far back).

    Each but the first two must be `gap` tokens from all that are preferred to it, and each but the last hint must save
    `gap` tokens over `start`. The last hint is kept however little it saves: where the next turn's render differs from
    there on, it is the deepest place to go on from, and in a short conversation the only one.
    """
    taken: list[int] = []

    def apart(position: int) -> bool:
        return all(abs(position - other) >= gap for other in taken)

    def worth(position: int) -> bool:
        return start + gap <= position <= end

    inside = sorted({hint for hint in hints if 0 < hint <= prompt})
    last = inside[-1] if inside else 0
    if worth(prompt):
        taken.append(prompt)
    if start < last <= end and last != prompt:
        taken.append(last)
    if inside and worth(inside[0]) and apart(inside[0]):
        taken.append(inside[0])
    further = 0
    for hint in reversed(inside[1:-1]):
        if further < MOST_HINTS and worth(hint) and apart(hint):
            taken.append(hint)
            further += 1
    for position in range(start // interval * interval + interval, end + 1, interval):
        if worth(position) and apart(position):
            taken.append(position)
    return tuple(sorted(taken))
