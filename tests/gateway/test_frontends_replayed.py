"""What real agent clients sent (tests/frontends has recorded it), asked again of a gateway that has the family's own
template and tokenizer. The engine says what the recorded one said, so each request's history is this test's own.

OpenFox is on no registry: its exchange is that of its own client code (src/server/llm of co-l/openfox at b08ffeae) in
the hands of a loop that reads and writes the files, after the warm-up and the title that OpenFox asks for.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from tests.gateway.fake_engines import Call, FakeEngines
from tests.gateway.http_gateway import Gateway, gateway
from tests.gateway.tiny import decode, encode, tiny_engines

FOLDER = Path(__file__).parent / "data" / "frontends"
AGENTS = ("qwen-code", "opencode", "codex", "claude-code", "openfox")
OPENS = "<think>\n"


def recorded(name: str) -> list[dict[str, Any]]:
    return json.loads((FOLDER / f"{name}.json").read_text())["requests"]


def is_turn(request: dict[str, Any]) -> bool:
    """Of the conversation: not for a title, nor to warm the cache."""
    return "tools" in request["body"] and request["body"]["stream"]


def spoken(request: dict[str, Any]) -> list[int]:
    """The tokens of the recorded answer, behind a prompt that has opened the thoughts already."""
    said = request["said"]
    return encode((said.removeprefix(OPENS) if said.startswith(OPENS) else "\n</think>\n\n" + said) + "<|im_end|>")


def saying(requests: Sequence[dict[str, Any]]) -> FakeEngines:
    """Engines that say what was said to each of these, three tokens at a time."""
    engines = tiny_engines()
    engines.cards = [replace(card, max_model_len=32_768) for card in engines.cards]
    left = iter(requests)

    def play(call: Call) -> None:
        ids = spoken(next(left))
        for place in range(0, len(ids) - 3, 3):
            call._deliver(tuple(ids[place : place + 3]))
        call._deliver(tuple(ids[len(call.stream.output) :]), "stop", cached_device=7)

    engines.on_call = play
    return engines


@dataclass
class Heard:
    """What a client makes of a stream."""

    thoughts: str = ""
    text: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Name, then the fragments of the arguments."""
    ended: bool = False


async def send(g: Gateway, request: dict[str, Any]) -> Heard:
    model = request["body"]["model"].replace("scripted", "samovar-tiny")
    body = request["body"] | {"model": model}
    response = await g.http.post(request["path"], headers=request["headers"], json=body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return Heard(text=response.json()["choices"][0]["message"]["content"], ended=True)
    events = [
        json.loads(line.removeprefix("data: "))
        for line in response.text.splitlines()
        if line.startswith("data: ") and line != "data: [DONE]"
    ]
    if "chat/completions" in request["path"]:
        return chat(events, response)
    return messages(events) if "messages" in request["path"] else responses(events)


def chat(events: list[dict[str, Any]], response: httpx.Response) -> Heard:
    heard = Heard(ended=response.text.endswith("data: [DONE]\n\n"))
    for choice in itertools.chain.from_iterable(event["choices"] for event in events):
        delta = choice["delta"]
        heard.thoughts += delta.get("reasoning_content", "")
        heard.text += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "name" in call["function"]:
                heard.calls.append([call["function"]["name"]])
            heard.calls[call["index"]].append(call["function"]["arguments"])
    return heard


def messages(events: list[dict[str, Any]]) -> Heard:
    heard = Heard(ended=events[-1]["type"] == "message_stop")
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            heard.calls.append([event["content_block"]["name"]])
        delta = event.get("delta", {})
        heard.thoughts += delta.get("thinking", "")
        heard.text += delta.get("text", "")
        if delta.get("type") == "input_json_delta":
            heard.calls[-1].append(delta["partial_json"])
    return heard


def responses(events: list[dict[str, Any]]) -> Heard:
    heard = Heard(ended=events[-1]["type"] == "response.completed")
    for event in events:
        match event["type"]:
            case "response.output_item.added" if event["item"]["type"] in ("function_call", "custom_tool_call"):
                heard.calls.append([event["item"]["name"]])
            case "response.function_call_arguments.delta" | "response.custom_tool_call_input.delta":
                heard.calls[-1].append(event["delta"])
            case "response.reasoning_text.delta":
                heard.thoughts += event["delta"]
            case "response.output_text.delta":
                heard.text += event["delta"]
    return heard


def parsed(arguments: str) -> Any:
    """A custom tool's input is no JSON."""
    return json.loads(arguments) if arguments.startswith("{") else arguments


def calls_in(body: dict[str, Any]) -> list[tuple[str, Any]]:
    """The calls of a request's history, in order."""
    found = []
    for message in body.get("messages") or body["input"]:
        if message.get("type") == "custom_tool_call":
            found.append((message["name"], message["input"]))
        if message.get("type") == "function_call":
            found.append((message["name"], json.loads(message["arguments"])))
        for call in message.get("tool_calls", ()):
            found.append((call["function"]["name"], json.loads(call["function"]["arguments"])))
        if message.get("role") == "assistant" and isinstance(message["content"], list):
            found += [(block["name"], block["input"]) for block in message["content"] if block["type"] == "tool_use"]
    return found


@pytest.mark.parametrize("name", AGENTS)
async def test_what_was_recorded_is_understood_as_it_was_then(name: str) -> None:
    requests = recorded(name)
    async with gateway(saying(requests)) as g:
        heard = [await send(g, request) for request in requests]
    assert all(answer.ended for answer in heard)
    turns = [(request, answer) for request, answer in zip(requests, heard, strict=True) if is_turn(request)]
    made = [(call[0], parsed("".join(call[1:]))) for _, answer in turns for call in answer.calls]
    assert made == calls_in(turns[-1][0]["body"])
    assert [answer.thoughts for _, answer in turns] == ["First the file.", "Now I write it.", ""]
    assert turns[0][1].text == "I look at it."
    assert turns[1][1].text == ""
    assert turns[2][1].text.startswith("The word is heron-")


@pytest.mark.parametrize("name", AGENTS)
async def test_each_turn_goes_on_exactly_where_the_last_one_ended(name: str) -> None:
    requests = [request for request in recorded(name) if is_turn(request)]
    engines = saying(requests)
    async with gateway(engines) as g:
        for request in requests:
            await send(g, request)
    assert len({call.session_id for call in engines.calls}) == 1
    for before, after, request in zip(engines.calls, engines.calls[1:], requests, strict=False):
        history = before.prompt + spoken(request)
        assert decode(after.prompt[: len(history)]) == decode(history)
        assert after.prompt[: len(history)] == history
