"""What an answer consists of, in the order in which the model wrote it. Every API family renders these."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Some of the model's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Some of the answer proper."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Some of a tool call. The arguments of all deltas of one index, put together, are a JSON object."""

    index: int
    """Counts the answer's calls from 0. A call's deltas are all given before those of the next one."""
    arguments: str
    id: str = ""
    """In the first delta of an index and only there; so is `name`."""
    name: str = ""


Piece = Reasoning | Content | CallDelta
