"""How a tool call grows at the client: one call whose string value is 4,000 characters long, from a scripted engine at
100 tokens/s through NATS, the gateway and HTTP. Counted are the gaps between the deltas of that value. (From its last
character to the delta that ends it come the closing tags, about ten tokens: only what follows them tells that they do
not belong to the value.)
"""

import asyncio
import itertools
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench import results, timeline
from bench.scripted_stack import scripted_stack

RATE = 100
CHARACTERS = 4000
MOST_TOKEN_TIMES = 3
PICTURE = Path(__file__).resolve().parent.parent / "docs" / "tool-stream.svg"

_LINES = (
    "def area(shape: Shape) -> float:\n",
    '    """Of a <shape>, in square metres; "unknown" ones give 0."""\n',
    "    if shape.kind == 'circle' and shape.radius < LIMIT:\n",
    "        return math.pi * shape.radius ** 2  # \u03c0r\u00b2\n",
    "\n",
    "    html = '<p class=\"total\">' + total + '</p>'\n",
    "    pattern = r'\\d+\\s*</param'  # what only begins like a closing tag\n",
    "\n\n",
)
_TOKEN = re.compile(r" ?\w{1,8}|[^\w\s]{1,3}|\s+?(?=\s?\S|$)|\s+")
TOOL = {
    "type": "function",
    "function": {
        "name": "write_file",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        },
    },
}


@dataclass(frozen=True, slots=True)
class Seen:
    """What the client saw of the call. Seconds since the request was sent."""

    named: float
    """When the delta with the name came."""
    deltas: list[tuple[float, str]]
    """When some of the arguments came, and which."""


def main() -> None:
    value, pieces = long_call()
    script = {"when": "go", "pieces": pieces, "delay_ms": 1000 / RATE, "finish": "stop"}
    seen = asyncio.run(_watch(script))
    arguments = json.loads("".join(text for _, text in seen.deltas))
    if arguments != {"path": "area.py", "content": value}:
        raise RuntimeError("the arguments that arrived are not those that were written")
    times = _within_value(seen.deltas)
    gaps = sorted((later - earlier) * RATE for earlier, later in itertools.pairwise(times))
    median, largest = gaps[len(gaps) // 2], gaps[-1]
    measured = {
        "value_characters": len(value),
        "tokens": len(pieces),
        "tokens_per_second": RATE,
        "argument_deltas": len(seen.deltas),
        "gap_token_times": {
            "median": round(median, 2),
            "p99": round(gaps[int(len(gaps) * 0.99)], 2),
            "largest": round(largest, 2),
            "allowed": MOST_TOKEN_TIMES,
        },
        "seconds_from_name_to_first_argument": round(seen.deltas[0][0] - seen.named, 3),
        "seconds_from_first_to_last_character": round(times[-1] - times[0], 3),
        "token_times_from_last_character_to_end_of_arguments": round((seen.deltas[-1][0] - times[-1]) * RATE, 2),
    }
    PICTURE.write_text(
        timeline.svg(
            f"A tool call of {CHARACTERS:,} characters at {RATE} tokens/s, as its client sees it",
            seen.named,
            [(at, len(text)) for at, text in seen.deltas],
            f"{len(seen.deltas)} deltas; within the value: largest gap {largest:.1f} token times, median {median:.1f}",
        )
    )
    print(json.dumps(measured, indent=1))
    print(f"written to {results.write('tool-stream', measured)} and {PICTURE}")


def _within_value(deltas: list[tuple[float, str]]) -> list[float]:
    """When the deltas came that hold some of the long value; the last of all only ends it."""
    so_far, times = "", []
    for at, text in deltas[:-1]:
        so_far += text
        if '"content": "' in so_far:
            times.append(at)
    return times


def long_call() -> tuple[str, list[str]]:
    """The value, and the answer as pieces that are much like a byte-level vocabulary's tokens."""
    value = ("".join(_LINES) * (CHARACTERS // len("".join(_LINES)) + 1))[: CHARACTERS - 1] + "#"
    pieces = ["I", " write", " it", ".\n\n", "<tool_call>", "\n", "<", "function", "=write", "_file", ">", "\n"]
    pieces += ["<", "parameter", "=path", ">", "\n", "area", ".py", "\n", "</", "parameter", ">", "\n"]
    pieces += ["<", "parameter", "=content", ">", "\n"]
    pieces += _TOKEN.findall(value)
    pieces += ["\n", "</", "parameter", ">", "\n", "</", "function", ">", "\n", "</tool_call>"]
    return value, pieces


async def _watch(script: dict[str, Any]) -> Seen:
    with scripted_stack(script) as stack:
        await stack.ready()
        body = {
            "model": "scripted",
            "stream": True,
            "messages": [{"role": "user", "content": "go"}],
            "tools": [TOOL],
        }
        named = 0.0
        deltas: list[tuple[float, str]] = []
        async with httpx.AsyncClient(timeout=60) as client:
            began = time.monotonic()
            async with client.stream("POST", f"{stack.url}/v1/chat/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    now = time.monotonic() - began
                    if not line.startswith("data: {"):
                        continue
                    for choice in json.loads(line[6:])["choices"]:
                        for call in choice["delta"].get("tool_calls", ()):
                            if "name" in call["function"]:
                                named = now
                            if call["function"]["arguments"]:
                                deltas.append((now, call["function"]["arguments"]))
        return Seen(named, deltas)
