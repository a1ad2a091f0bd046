"""Where a prompt parts from what its session has asked before: token positions and roles, never a text.

A cache finds what a prompt shares with an earlier one. When that is little, the question is whether the cache lost it
or the client sent something else; the second can only be seen here, where the ids of earlier prompts are still known.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.gateway.turns import Turns
from services.protocol.generate import pack_ids
from services.protocol.hashing import BlockHash

CONTEXTS = 4
"""A session, at most: its history, and where sub-agents and edits left it. What goes on from one takes its place."""
BYTES = 32 * 2**20
"""Of ids: 8 million tokens, whose cache blocks would take 250 GiB at the fp8 cache's 33 KB a token."""
OTHERS = 8
"""Sessions used last that the first prompt of a new one is compared to."""

_OVERHEAD = 512
"""Bytes that a context takes beside its ids, about."""
_PIECE = 2**16
"""Bytes compared at once: a slice is copied, which L2 takes."""


@dataclass(slots=True, eq=False)
class Context:
    """One prompt, and the answer to it when that is over."""

    session_id: str
    ids: bytes
    """Packed: the prompt's, then the answer's."""
    prompt: int
    """Tokens of the prompt."""
    suffix: int
    """Where the prompt's last turn begins, which is the answer's."""


@dataclass(frozen=True, slots=True)
class Parting:
    """A prompt beside the most similar earlier one."""

    session_id: str
    """Of the earlier one."""
    position: int
    """Tokens from the start that are the same in both."""
    diverged: bool
    """The prompt does not go on from the earlier one: at `position` it says something else."""
    message: int | None = None
    """Where it diverged: as `turns.Place.message`."""
    role: str = ""
    """As `turns.Place.role`; empty where it is not known."""
    generated: bool = False
    """It diverged in an answer: what came back is not what was generated."""
    own: bool = True
    """The earlier one is of the same session, or of the one that it forked from."""


@dataclass(frozen=True, slots=True)
class Near:
    contexts: tuple[Context, ...]
    """Newest first."""
    own: bool
    """They are of the prompt's session, or of the one that it forked from."""


class Contexts:
    """The last contexts of each session, those of sessions used longest ago forgotten first. On the event loop's
    thread. A session's contexts are only compared under the same `root`: ids of another model mean something else, and
    one tenant must not learn what it shares with another."""

    def __init__(self, most_bytes: int = BYTES) -> None:
        self._most_bytes = most_bytes
        self._sessions: OrderedDict[tuple[BlockHash, str], list[Context]] = OrderedDict()
        self._bytes = 0

    @property
    def size(self) -> int:
        """Bytes that are held, about."""
        return self._bytes

    def near(self, root: BlockHash, session_id: str, parent: str | None) -> Near:
        """What a prompt of this session is to be compared to: its own contexts and those of the session that it forked
        from; where there are none, the newest one of each of the sessions used last."""
        own = [*reversed(self._sessions.get((root, session_id), ()))]
        if parent is not None:
            own += reversed(self._sessions.get((root, parent), ()))
        return Near(tuple(own), True) if own else Near(tuple(self._others(root)), False)

    def _others(self, root: BlockHash) -> Iterator[Context]:
        left = OTHERS
        for (other, _), contexts in reversed(self._sessions.items()):
            if other == root:
                yield contexts[-1]
                left -= 1
                if not left:
                    return

    def began(self, root: BlockHash, session_id: str, prompt: bytes, turns: Turns) -> Context:
        """An engine has taken this prompt."""
        tokens = len(prompt) // 4
        context = Context(session_id, prompt, tokens, turns.suffix(prompt))
        contexts = self._sessions.setdefault((root, session_id), [])
        for earlier in [*contexts]:
            if prompt.startswith(earlier.ids):
                self._drop(contexts, earlier)
        if len(contexts) == CONTEXTS:
            self._drop(contexts, contexts[0])
        contexts.append(context)
        self._bytes += _size(context)
        self._sessions.move_to_end((root, session_id))
        self._trim()
        return context

    def ended(self, root: BlockHash, context: Context, output: Sequence[int]) -> None:
        """The answer is over, complete or not."""
        if context not in self._sessions.get((root, context.session_id), ()):
            return
        self._bytes -= _size(context)
        context.ids = context.ids[: 4 * context.prompt] + pack_ids(output)
        self._bytes += _size(context)
        self._trim()

    def _drop(self, contexts: list[Context], context: Context) -> None:
        contexts.remove(context)
        self._bytes -= _size(context)

    def _trim(self) -> None:
        while self._bytes > self._most_bytes and self._sessions:
            key, contexts = next(iter(self._sessions.items()))
            self._drop(contexts, contexts[0])
            if not contexts:
                del self._sessions[key]


def _size(context: Context) -> int:
    return len(context.ids) + _OVERHEAD


def parting(prompt: bytes, near: Near, turns: Turns) -> Parting | None:
    """Compare a prompt (packed) with those near it. None where it shares no token with any. From any thread; 0.1 ms for
    262,144 ids that are the same, and 0.5 ms more to find the message in which they part."""
    best: Context | None = None
    ids, shared = b"", 0
    for context in near.contexts:
        one = context.ids
        end = 4 * shared
        if one[end : end + 4] != prompt[end : end + 4] or len(one) == end:
            continue  # and so it shares no more than the best one
        if (same := common(prompt, one)) > shared:
            best, ids, shared = context, one, same
    if best is None:
        return None
    if 4 * shared == len(ids) or shared >= turns.suffix(prompt):
        return Parting(best.session_id, shared, diverged=False, own=near.own)
    place = turns.place(prompt, shared)
    message, role = (place.message, place.role) if place is not None else (None, "")
    if best.suffix <= shared < best.prompt and role != "assistant":
        # The next question without the answer to the last one: an answer that was given up, not history rewritten.
        return Parting(best.session_id, shared, diverged=False, own=near.own)
    return Parting(best.session_id, shared, True, message, role, generated=shared >= best.suffix, own=near.own)


def common(one: bytes, other: bytes) -> int:
    """Tokens from the start that two packed prompts share."""
    if one.startswith(other) or other.startswith(one):  # compares in place
        return min(len(one), len(other)) // 4
    start = 0
    while one.startswith(other[start : start + _PIECE], start):
        start += _PIECE
    size = _PIECE
    while size > 4:
        size //= 2
        if one.startswith(other[start : start + size], start):
            start += size
    return start // 4
