"""What parameters mean and what tools do, apart from how a schema names them."""

from dataclasses import dataclass
from typing import Literal

from tools.train.tasks.tools.schema import Kind
from tools.train.tasks.tools.values import Draw

Style = Literal["plain", "quoted", "last", "block"]
"""How a request writes a value: bare or in quotes; always in quotes; bare only at the end; on lines of its own."""


@dataclass(frozen=True, slots=True)
class Role:
    """One meaning of a parameter."""

    key: str
    """Its placeholder in phrasings."""
    names: tuple[str, ...]
    """What schemas call it."""
    descriptions: tuple[str, ...]
    draw: Draw
    kind: Kind = "string"
    style: Style = "plain"
    choices: tuple[str, ...] = ()
    optional: bool = False
    """Not required by the schema; a call carries it only if the request says something of it."""


@dataclass(frozen=True, slots=True)
class Skill:
    """One thing that a tool can do.

    A phrasing is an instruction without its capital and full stop ("read {path}") or a question with its mark. `{key}`
    stands for a value; `{key=VALUE}` writes nothing and sets a parameter ("list {path} with subfolders{deep=true}").
    """

    topic: str
    """A kit has at most one skill of a topic: no request may fit two tools."""
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    roles: tuple[Role, ...]
    phrasings: tuple[str, ...]
