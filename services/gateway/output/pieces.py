"""What an answer consists of, in the order in which the model wrote it. Every API family renders these."""

from collections.abc import Sequence

from msgspec import Struct


class Reasoning(Struct, frozen=True):
    """Some of the model's thoughts."""

    text: str


class Content(Struct, frozen=True):
    """Some of the answer proper."""

    text: str


class CallDelta(Struct, frozen=True):
    """Some of a tool call. The arguments of all deltas of one index, put together, are a JSON object if the last of
    them is `done`; the call that an answer breaks off in has none that is."""

    index: int
    """Counts the answer's calls from 0. A call's deltas are all given before those of the next one."""
    arguments: str
    id: str = ""
    """In the first delta of an index and only there; so is `name`."""
    name: str = ""
    done: bool = False
    """The call is complete with this delta."""
    raw: str = ""
    """With `done`: the call as the model wrote it, tags included."""


Piece = Reasoning | Content | CallDelta


def without_broken_call(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces of a whole answer without the call that it breaks off in: shown at once, a value that was cut would
    look complete."""
    done = {piece.index for piece in pieces if isinstance(piece, CallDelta) and piece.done}
    return [piece for piece in pieces if not isinstance(piece, CallDelta) or piece.index in done]
