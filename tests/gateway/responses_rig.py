"""Responses over HTTP, with the family's small model whose words are the test's."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from services.protocol.generate import FinishReason
from tests.gateway.fake_engines import Call, FakeEngines
from tests.gateway.http_gateway import Gateway
from tests.gateway.tiny import decode, encode, tiny_engines

TINY = "samovar-tiny"
READ = {
    "type": "function",
    "name": "read",
    "description": "Reads a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}},
    "strict": False,
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin hunk+ end"},
}
PATCH_TEXT = '*** Begin Patch\n+say("ä\\n😀")\n*** End Patch'
READ_CALL = (
    "<tool_call>\n<function=read>\n<parameter=path>\na.py\n</parameter>\n<parameter=lines>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
PATCH_CALL = (
    f"<tool_call>\n<function=apply_patch>\n<parameter=input>\n{PATCH_TEXT}\n</parameter>\n</function>\n</tool_call>"
)


def saying(*texts: str, finish: FinishReason = "stop", cut: int = 3) -> FakeEngines:
    """Engines that answer with these texts in turn, the last one again and again, `cut` tokens at a time."""
    engines = tiny_engines()
    left = list(texts)

    def play(call: Call) -> None:
        text = left.pop(0) if len(left) > 1 else left[0]
        ids = encode(text + ("<|im_end|>" if finish == "stop" else ""))
        for place in range(0, len(ids) - cut, cut):
            call._deliver(tuple(ids[place : place + cut]))
        rest = len(call.stream.output)
        call._deliver(tuple(ids[rest:]), finish, cached_device=7)

    engines.on_call = play
    return engines


def prompt_of(call: Call) -> str:
    return decode(call.prompt)


def client(g: Gateway) -> Any:
    """An `openai.AsyncOpenAI`. Its parameters and items are unions of dozens of types: untyped here."""
    return openai.AsyncOpenAI(base_url=f"{g.url}/v1", api_key="any", max_retries=0, timeout=10)


async def post(g: Gateway, path: str = "/v1/responses", **fields: Any) -> httpx.Response:
    return await g.http.post(path, json={"model": TINY, **fields})


@dataclass(frozen=True)
class Events:
    """The events of a stream, checked for what holds for every one of them."""

    all: Sequence[dict[str, Any]]

    @classmethod
    def of(cls, text: str) -> "Events":
        blocks = text.split("\n\n")
        assert blocks.pop() == ""
        found = []
        for number, block in enumerate(blocks):
            name, _, data = block.partition("\n")
            event = json.loads(data.removeprefix("data: "))
            assert "\n" not in data
            assert name == f"event: {event['type']}"
            assert event["sequence_number"] == number
            found.append(event)
        return cls(found)

    @property
    def types(self) -> list[str]:
        """Without `response.`, each run of equal ones once."""
        names = [event["type"].removeprefix("response.") for event in self.all]
        return [name for place, name in enumerate(names) if not place or names[place - 1] != name]

    def of_type(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.all if event["type"] == f"response.{name}"]

    @property
    def final(self) -> dict[str, Any]:
        return self.all[-1]["response"]


def plain(output: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without what differs from answer to answer."""
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in output]
