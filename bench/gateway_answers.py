"""What the engine says while the gateway's cost is measured: thoughts, text with code in it, a tool call with a long
string and one with other types, as pieces that are much like a byte-level vocabulary's tokens."""

import itertools
import re
from dataclasses import dataclass
from typing import Any

from services.engine.scripted_vocabulary import VOCABULARY, encode
from services.gateway.output.parser import OutputParser
from services.gateway.output.pieces import CallDelta, Content, Piece, Reasoning
from services.gateway.output.token_bytes import TokenBytes
from services.gateway.output.tool_arguments import Tools

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "description": "Write a file; what it held before is gone.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
                "required": ["path", "content"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find lines by a pattern.",
            "parameters": {
                "type": "object",
                "properties": {
                    "pattern": {"type": "string"},
                    "paths": {"type": "array", "items": {"type": "string"}},
                    "limit": {"type": "integer"},
                    "case": {"type": "boolean"},
                },
            },
        },
    },
]

_THOUGHTS = (
    "The user wants the area of each shape. I should look at `shapes.py` first: there is a <shape> element in it, "
    "and the units are square metres (m²). If the kind is unknown, 0 is right; an exception would end the report. "
) * 3
_CONTENT = (
    "I will add **one function** and a test for it. It handles circles and rectangles, everything else is 0:\n\n"
    "```python\nif shape.radius < LIMIT and shape.kind == 'circle':\n    return math.pi * shape.radius ** 2\n```\n\n"
    "- `area(shape)` is < 20 lines long\n- the report shows “n/a” for <unknown> shapes\n\nNow I write it.\n\n"
)
_LINES = (
    "def area(shape: Shape) -> float:\n"
    '    """Of a <shape>, in square metres; "unknown" ones give 0."""\n'
    "    if shape.kind == 'circle' and shape.radius < LIMIT:\n"
    "        return math.pi * shape.radius ** 2  # πr²\n"
    "\n"
    "    html = '<p class=\"total\">' + total + '</p>'\n"
    "    pattern = r'\\d+\\s*</param'  # what only begins like a closing tag\n"
    "\n\n"
)
_ANSWER = f"""\
<think>
{_THOUGHTS}
</think>

{_CONTENT}<tool_call>
<function=write_file>
<parameter=path>
src/area.py
</parameter>
<parameter=content>
{_LINES * 6}
</parameter>
</function>
</tool_call>
<tool_call>
<function=search>
<parameter=pattern>
area\\(
</parameter>
<parameter=paths>
["src", "tests"]
</parameter>
<parameter=limit>
50
</parameter>
<parameter=case>
true
</parameter>
</function>
</tool_call>"""

_TAGS = re.compile("(</?think>|</?tool_call>)")
_TOKEN = re.compile(r" ?\w{1,8}|[^\w\s]{1,3}|\s+?(?=\s?\S|$)|\s+")


@dataclass(frozen=True, slots=True)
class Said:
    """An answer as a client has it at the end."""

    thoughts: str
    content: str
    calls: tuple[str, ...]
    """The arguments of each, as JSON."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """How much of an answer there is to see behind each of its tokens."""

    pieces: tuple[str, ...]
    """One a token."""
    ends: tuple[int, ...]
    """Ids on the wire up to and with each piece, and at last the one that ends the answer."""
    shown: tuple[int, ...]
    """Characters of thoughts, content and arguments that a client may have by then; ascending."""
    said: Said


def timeline() -> Timeline:
    """Of the answer that all streams give. What may be seen when is the parser's own rule (it holds back what may
    become a tag); so what is measured against it is the time that passes, not the rule."""
    pieces = [piece for part in _TAGS.split(_ANSWER) for piece in ([part] if _TAGS.match(part) else _tokens(part))]
    hidden = range(256, 259)
    parser = OutputParser(
        TokenBytes([b"" if id in hidden else data for id, data in enumerate(VOCABULARY)]), tools=Tools(TOOLS)
    )
    ends = list(itertools.accumulate(len(encode(piece.encode())) for piece in pieces))
    fed = [parser.feed(encode(piece.encode())) for piece in pieces]
    fed.append(parser.finish())
    shown = list(itertools.accumulate(sum(_length(piece) for piece in found) for found in fed))
    return Timeline(tuple(pieces), (*ends, ends[-1] + 1), tuple(shown), _said([p for found in fed for p in found]))


def _tokens(text: str) -> list[str]:
    return _TOKEN.findall(text)


def _length(piece: Piece) -> int:
    return len(piece.arguments) if isinstance(piece, CallDelta) else len(piece.text)


def _said(pieces: list[Piece]) -> Said:
    calls: dict[int, str] = {}
    for piece in pieces:
        if isinstance(piece, CallDelta):
            calls[piece.index] = calls.get(piece.index, "") + piece.arguments
    return Said(
        thoughts="".join(piece.text for piece in pieces if isinstance(piece, Reasoning)),
        content="".join(piece.text for piece in pieces if isinstance(piece, Content)),
        calls=tuple(calls.values()),
    )
