"""The cases that other engines broke on, as lines of a script: a user's `T01 by 3` is answered with that case's text,
three characters a piece."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tests.gateway.output_rig import CASES, cuts_of

CALLS = ("T01", "T02", "T04", "T07", "T08", "T11")
"""Cases whose answer has tool calls."""
SIZES = (*range(1, 10), 0)
"""Characters a piece; 0: all in one."""


def text_of(name: str) -> str:
    given = CASES[name]["input"]
    return given.get("model_text") or "".join(given["deltas"])


def script() -> Iterator[str]:
    """Lines of a scripted engine's file."""
    for name in CALLS:
        finish = CASES[name]["input"].get("engine_finish", "stop")
        for size, pieces in zip(SIZES, cuts_of(text_of(name)), strict=True):
            yield _line(f"{name} by {size}.", pieces, finish)
    yield _line("T07 as it came.", CASES["T07"]["input"]["deltas"])
    hexes = CASES["T12"]["input"]["token_bytes_hex"]
    yield _line("T12 whole.", [{"hex": part} for part in hexes])
    yield _line("T12 half.", [{"hex": part} for part in hexes[:1]], "length")
    pieces, block = CASES["T13"]["input"]["variants"]
    yield _line("T13 pieces.", pieces["deltas"])
    yield _line("T13 block.", ["".join(block["one_accepted_block"])])
    yield _line("T14.", ["AB<|im_end|>CDE"])
    yield _line("T17.", cuts_of(CASES["T17"]["input"]["turn1_generated"])[6])


def _line(when: str, pieces: Sequence[Any], finish: str = "stop") -> str:
    return json.dumps({"when": when, "pieces": list(pieces), "delay_ms": 0, "finish": finish})
