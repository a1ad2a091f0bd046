"""`python -m tests.gateway.fuzz_output [--documents N] [--mutated N] [--seconds S] [--seed N] [--jobs N]`

Documents: random answers, each parsed whole and at a random cut, which must give the same pieces; every call that is
complete must be a JSON object. Mutated: answers with characters changed, dropped, doubled and moved, at a random cut,
which must give a parse without an exception. Each document has a seed of its own, which a failure tells: `--seed` of it
and a count of 1 show it again. Needs no package beside those of `services.gateway.output`, which is msgspec alone.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from services.gateway.output.pieces import CallDelta, Content, Reasoning
from services.gateway.output.tool_arguments import Tools
from tests.gateway.output_rig import call, content, merged, parser_of, random_cut, reasoning, tools

_SCHEMAS: dict[str, Any] = {
    "path": {"type": "string"},
    "text": {"type": ["string", "null"]},
    "flag": {"anyOf": [{"type": "boolean"}, {"type": "string"}]},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "options": {"$ref": "#/$defs/Options"},
    "any": {},
}
KNOWN: Tools = tools(read={"path": _SCHEMAS["path"]}, write=_SCHEMAS, f={})

_TAGS = (
    *("<tool_call>", "</tool_call>", "<function=read>", "<function=write>", "<function=unknown>", "</function>"),
    *("<parameter=path>", "<parameter=text>", "<parameter=count>", "<parameter=odd>", "</parameter>"),
    *("<think>", "</think>", "\n", "\n\n", " ", "```", "```xml\n", "\n```\n", "`", "~~~\n"),
)
_TEXTS = ("x", "ä😊", "<", "</", "<i>", '"', "\\", "\\n", "\t", "null", "true", "None", "{", "}", "STOP", "some words ")
_VALUES = (
    *("a.py", "", "\n", " x \n", "42", "-0.5e3", "1e999", "null", "None", "True", "nul", "[1, 2", '["a", null]', "{}"),
    *('{"a": [true]}', "{'a': 1}", "</parameter>", "</parameter> x", "</function>\n</tool_call> x", "<tool_call>", "é"),
    *("<parameter=path>\n", "\n<parameter=text>\n", "```\ncode\n```", "NaN", '"quoted"', "line\nline\n\n", "\x00\x1f"),
)
_STOPS: tuple[tuple[str, ...], ...] = ((), (), ("STOP",), ("<", "\n\n"), ("x s",))


def document(choice: random.Random) -> str:
    parts = []
    for _ in range(choice.randint(1, 7)):
        kind = choice.random()
        if kind < 0.3:
            values = {name: choice.choice(_VALUES) for name in choice.sample([*_SCHEMAS, "odd"], choice.randint(0, 3))}
            parts.append(call(choice.choice(("read", "write", "f", "unknown")), **values))
        elif kind < 0.4:
            arguments = {name: choice.choice(_VALUES) for name in choice.sample(list(_SCHEMAS), choice.randint(0, 2))}
            text = json.dumps({"name": choice.choice(("read", "unknown")), "arguments": arguments})
            parts.append(f"<tool_call>\n{text}\n</tool_call>")
        else:
            parts += choice.choices(_TAGS + _TEXTS + _VALUES, k=choice.randint(1, 6))
    text = "".join(parts)
    if choice.random() < 0.3:  # drift: a tag is missing
        tag = choice.choice(_TAGS[:11])
        text = text.replace(tag, "", choice.randint(1, 2))
    return text


def mutated(text: str, choice: random.Random) -> str:
    chars = list(text)
    for _ in range(choice.randint(1, 6)):
        at, to = sorted(choice.randint(0, len(chars)) for _ in range(2))
        match choice.randrange(4):
            case 0:
                chars[at : min(to, at + 4)] = []
            case 1:
                chars[at:at] = choice.choice((*_TAGS, *_TEXTS, chr(choice.randint(0, 0x2FFF))))
            case 2:
                chars[at:at] = chars[at : min(to, at + 40)]
            case _:
                chars[at:at], chars[to:] = chars[to : to + 30], chars[to + 30 :]
    return "".join(chars)


def _parse(texts: list[str], options: dict[str, Any], complete: bool) -> tuple[list[Any], int, int, bool]:
    parser = parser_of(KNOWN, **options)
    pieces = [piece for text in texts for piece in parser.feed(text.encode())] + parser.finish(complete)
    return merged(pieces), parser.consumed, parser.reasoning_tokens, parser.stopped


def _options(choice: random.Random) -> dict[str, Any]:
    return {"stop": choice.choice(_STOPS), "thinking": choice.random() < 0.3}


def check_document(seed: int) -> None:
    """Raises AssertionError with the document."""
    choice = random.Random(seed)
    text = document(choice)
    options, complete = _options(choice), choice.random() < 0.8
    whole = _parse([text], dict(options), complete)
    cut = random_cut(text, choice) if choice.random() < 0.8 else list(text)
    assert _parse(cut, dict(options), complete) == whole, (seed, text, cut, options, complete)
    pieces = whole[0]
    for piece in pieces:
        if isinstance(piece, CallDelta):
            assert piece.name, (seed, text)
            if piece.done:
                assert isinstance(json.loads(piece.arguments), dict), (seed, text)
                assert piece.raw in text, (seed, text, piece)
            else:
                assert not complete, (seed, text, piece)
        else:
            assert isinstance(piece, Content | Reasoning)
    if complete and not options["stop"]:
        _nothing_is_lost(text, pieces, seed)


def _nothing_is_lost(text: str, pieces: list[Any], seed: int) -> None:
    """Each character that is no space and no part of a tag comes out somewhere."""
    shown = content(pieces) + reasoning(pieces)
    shown += "".join(piece.raw for piece in pieces if isinstance(piece, CallDelta))
    for word in ("ä", "😊"):
        assert shown.count(word) >= text.count(word), (seed, text, pieces)


def check_mutated(seed: int) -> None:
    """Any exception tells the seed."""
    choice = random.Random(f"mutated {seed}")
    text = mutated(document(choice), choice)
    try:
        _parse(random_cut(text, choice), _options(choice), choice.random() < 0.8)
    except Exception as error:
        raise AssertionError((seed, text)) from error


_CHECKS: dict[str, Callable[[int], None]] = {"documents": check_document, "mutated": check_mutated}
_SHARE = 500
"""Documents that a process takes at once."""


def _check_share(name: str, seeds: range, deadline: float) -> int:
    """How many were checked until `deadline`, in time.monotonic() seconds, which all processes of a machine share."""
    check = _CHECKS[name]
    for done, seed in enumerate(seeds):
        if time.monotonic() >= deadline:
            return done
        check(seed)
    return len(seeds)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fuzz the parser of answers.")
    parser.add_argument("--documents", type=int, default=0)
    parser.add_argument("--mutated", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of each kind, at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first document")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    given = parser.parse_args(argv)
    with ProcessPoolExecutor(given.jobs) as processes:
        for name, count in (("documents", given.documents), ("mutated", given.mutated)):
            if not count:
                continue
            began = time.monotonic()
            end = given.seed + count
            shares = [
                processes.submit(_check_share, name, range(at, min(at + _SHARE, end)), began + given.seconds)
                for at in range(given.seed, end, _SHARE)
            ]
            try:
                done = sum(share.result() for share in shares)
            except AssertionError:
                processes.shutdown(cancel_futures=True)
                raise
            print(f"{done} {name} in {time.monotonic() - began:.1f} s, seeds from {given.seed}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
