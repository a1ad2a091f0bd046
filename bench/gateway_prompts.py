"""What long prompts do to streams under way: while some clients read theirs, another one sends a conversation of
200,000 tokens and 800,000 characters again and again."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from bench.gateway_answers import Timeline
from bench.gateway_client import body, stream
from bench.gateway_latency import added, deliveries, percentiles
from bench.gateway_phase import FAMILIES, RATE, Phase, loaded
from bench.scripted_stack import scripted_stack, stop

STREAMS = 16
SECONDS = 30.0
CONTEXT = 262_144
CONVERSATIONS = 4
"""Different from their first message on."""
PAUSE = 0.5
"""Seconds between an answer and the next prompt."""
MESSAGES = 200
_UNIT = "</tool_response>area"
"""20 characters, 5 tokens of the scripted vocabulary: as many characters a token as a real vocabulary has."""
_UNITS_A_MESSAGE = 200


async def long_prompts(answer: Timeline, seconds: float = SECONDS) -> dict[str, Any]:
    script = {"when": "go", "pieces": answer.pieces, "delay_ms": 1000 / RATE, "finish": "stop"}
    with tempfile.TemporaryDirectory() as folder:
        record, late = Path(folder) / "record", Path(folder) / "late"
        gateway, engine = ("bench.gateway_watched", str(late)), ("bench.recording_engine", str(record))
        with scripted_stack(script, gateway, engine, SAMOVAR_MAX_MODEL_LEN=str(CONTEXT)) as stack:
            await stack.ready()
            phase = Phase("beside", FAMILIES, STREAMS, seconds)
            prompts = _Prompts(stack.url)
            asking = asyncio.create_task(prompts.ask())
            load = await loaded(stack, phase, answer)
            asking.cancel()
            stop(stack.engine)
            latencies = added(load.exchanges, deliveries(record), answer, load.begin, load.end)
        stalls = _stalls(late, load.begin, load.end)
    return {
        "streams": STREAMS,
        "prompts": prompts.answered,
        "added_latency_ms": percentiles(latencies),
        "longest_stall_of_the_event_loop_ms": round(max(stalls, default=0.0), 2),
        "stalls_over_10_ms": sum(stall > 10 for stall in stalls),
    }


class _Prompts:
    """Long prompts, one after the other."""

    def __init__(self, url: str) -> None:
        self._url = url
        # Made beforehand: to make one takes this process some milliseconds, in which it reads no stream.
        self._bodies = [body("chat", _conversation(first), max_tokens=1) for first in range(CONVERSATIONS)]
        self.answered = 0

    async def ask(self) -> None:
        """For ever."""
        while True:
            await stream(self._url, "chat", "", self._bodies[self.answered % CONVERSATIONS])
            self.answered += 1
            await asyncio.sleep(PAUSE)


def _conversation(first: int) -> list[dict[str, str]]:
    text = _UNIT * _UNITS_A_MESSAGE
    roles = ("user", "assistant")
    turns = [{"role": roles[place % 2], "content": f"{first} {text}"} for place in range(MESSAGES)]
    return [*turns, {"role": "user", "content": "go"}]


def _stalls(record: Path, begin: int, end: int) -> list[float]:
    """Milliseconds."""
    lines = (map(int, line.split()) for line in record.read_text().splitlines())
    return [late / 1e6 for at, late in lines if begin <= at < end]
