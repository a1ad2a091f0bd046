"""Some of a tool call, as it is read out of the text."""

from msgspec import Struct


class CallPart(Struct, frozen=True):
    arguments: str
    """JSON, or a piece of it."""
    name: str = ""
    """In the first part of a call, and only there."""
    done: bool = False
    """The call is complete with this part."""
    raw: str = ""
    """With `done`: the call as the model wrote it, tags included."""
