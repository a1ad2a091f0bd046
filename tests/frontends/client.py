"""What a client is to this folder: a package of npm, how it is set up against Samovar, and its two tools."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.frontends.task import Call


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a client runs."""

    url: str
    """The gateway's, without a path."""
    model: str
    context: int
    """Tokens that the model holds."""
    output: int
    """Tokens of one answer at most, for clients that let one say so."""
    home: Path
    """An empty folder in the place of the user's."""
    folder: Path
    """Where the client works."""


@dataclass(frozen=True, slots=True)
class Launch:
    arguments: Sequence[str]
    """Behind the program's name."""
    environ: Mapping[str, str]
    """Beside PATH and HOME, which are all that it gets of the environment otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    name: str
    package: str
    version: str
    """Pinned: what docs/frontends.md tells was seen with this one."""
    program: str
    """In node_modules/.bin."""
    path: str
    """Of the endpoint that it uses."""
    ending: bytes
    """What the last event of a complete stream holds."""
    session: str
    """By what the gateway knows its sessions: a SessionSource."""
    read: Call
    write: Call
    delegate: Call | None = None
    """Starts a sub-agent with task.SUB_PROMPT."""
    titles: str = ""
    """Text that occurs in its requests for a title only."""
    set_up: Callable[[Setting, str], Launch]
    """Writes its configuration into `home` and `folder`; gives the command for a prompt."""
