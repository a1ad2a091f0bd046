"""What the tests of the output parser share: tools, texts of calls, and an answer's pieces put together."""

import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from services.gateway.output.parser import OutputParser
from services.gateway.output.pieces import CallDelta, Content, Piece, Reasoning, without_broken_call
from services.gateway.output.token_bytes import TokenBytes
from services.gateway.output.tool_arguments import Tools

CASES = {case["id"]: case for case in json.loads((Path(__file__).parent / "cases.json").read_text())}
BYTES = TokenBytes([bytes([byte]) for byte in range(256)])


def tools(**functions: dict[str, Any]) -> Tools:
    """Tools by name, each with the schemas of its parameters."""
    return Tools(
        [
            {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": schemas}}}
            for name, schemas in functions.items()
        ]
    )


READ = tools(read={"path": {"type": "string"}})


def call(name: str = "read", **parameters: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def parser_of(known: Tools, **options: Any) -> OutputParser:
    ids = itertools.count()
    return OutputParser(BYTES, options.pop("stop", ()), tools=known, call_id=lambda: f"call-{next(ids)}", **options)


def deltas_of(texts: Iterable[str], known: Tools = READ, complete: bool = True, **options: Any) -> list[Piece]:
    """All pieces of an answer whose bytes come in these texts."""
    parser = parser_of(known, **options)
    return [piece for text in texts for piece in parser.feed(text.encode())] + parser.finish(complete)


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of one kind, and of one call, put together."""
    whole: list[Piece] = []
    for piece in pieces:
        last = whole[-1] if whole else None
        if isinstance(piece, Content) and isinstance(last, Content):
            whole[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            whole[-1] = Reasoning(last.text + piece.text)
        elif isinstance(piece, CallDelta) and isinstance(last, CallDelta) and piece.index == last.index:
            assert (piece.id, piece.name, last.done) == ("", "", False)
            arguments = last.arguments + piece.arguments
            whole[-1] = CallDelta(last.index, arguments, last.id, last.name, piece.done, piece.raw)
        else:
            whole.append(piece)
    return whole


def pieces_of(texts: Iterable[str], known: Tools = READ, complete: bool = True, **options: Any) -> list[Piece]:
    return merged(deltas_of(texts, known, complete, **options))


def cuts_of(text: str) -> list[list[str]]:
    """After every character, at 2 to 9 characters, and not at all."""
    return [[text[at : at + size] for at in range(0, len(text), size)] for size in [*range(1, 10), max(len(text), 1)]]


def random_cut(text: str, choice: random.Random) -> list[str]:
    places = sorted(choice.randint(0, len(text)) for _ in range(choice.randint(0, 12)))
    return [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


def content(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


def reasoning(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))


def calls(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """The calls that are complete."""
    found = []
    for piece in merged(without_broken_call(list(pieces))):
        if isinstance(piece, CallDelta):
            assert piece.id == f"call-{piece.index}"
            found.append({"name": piece.name, "arguments": json.loads(piece.arguments)})
    return found
