"""Generated calls through HTTP in every API family, over a restart, and the bounds of what is kept."""

import json
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from services.gateway.call_memory import CallMemory
from services.gateway.output.heard_calls import HeardCalls
from services.gateway.sessions import RowBounds, SessionStore
from services.gateway.sessions.records import CallRecord
from tests.gateway.fake_engines import Call, FakeEngines
from tests.gateway.http_gateway import Gateway, events, gateway
from tests.gateway.output_rig import CASES, call, cuts_of, deltas_of, tools
from tests.gateway.responses_rig import TINY, prompt_of
from tests.gateway.tiny import encode, tiny_engines

GIVEN = CASES["T17"]["input"]
RAW: str = GIVEN["turn1_generated"]
ECHO: str = GIVEN["client_echo_turn2"]["tool_calls"][0]["function"]["arguments"]
SCHEMA = {"type": "object", "properties": {name: {"type": kind} for name, kind in GIVEN["schema"].items()}}
USER = {"role": "user", "content": "Deploy."}
ANSWER = encode(f"Hm.\n</think>\n\n{RAW}<|im_end|>")

Turns = Callable[[Gateway, bool, str], Awaitable[int]]
"""Two turns of one family, whose first may be streamed; the second sends these arguments back. The cached tokens of the
second, as its usage tells them."""


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are the same at the front."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def deploying() -> FakeEngines:
    """Engines that think, call and know what they have read and written."""
    engines = tiny_engines()
    seen: list[list[int]] = []

    def play(call: Call) -> None:
        common = [shared(before, call.prompt) for before in seen]
        seen.append([*call.prompt, *ANSWER])
        for place in range(0, len(ANSWER) - 3, 3):
            call._deliver(tuple(ANSWER[place : place + 3]))
        call._deliver(tuple(ANSWER[len(call.stream.output) :]), "stop", cached_device=max(common, default=0))

    engines.on_call = play
    return engines


async def chat(g: Gateway, stream: bool, back: str) -> int:
    tools = [{"type": "function", "function": {"name": "deploy", "parameters": SCHEMA}}]
    response = await g.chat(model=TINY, messages=[USER], tools=tools, stream=stream)
    if stream:
        deltas = [chunk["choices"][0]["delta"] for chunk in events(response.text) if chunk["choices"]]
        (id,) = [call["id"] for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
    else:
        id = response.json()["choices"][0]["message"]["tool_calls"][0]["id"]
    call = {"id": id, "type": "function", "function": {"name": "deploy", "arguments": back}}
    message = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": id, "content": "done"}
    second = await g.chat(model=TINY, messages=[USER, message, result], tools=tools)
    return second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def messages(g: Gateway, stream: bool, back: str) -> int:
    body = {
        "model": TINY,
        "max_tokens": 1000,
        "tools": [{"name": "deploy", "input_schema": SCHEMA}],
        "thinking": {"type": "adaptive"},
    }
    response = await g.http.post("/v1/messages", json={**body, "messages": [USER], "stream": stream})
    if stream:
        told = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: ")]
        blocks = [event["content_block"] for event in told if event["type"] == "content_block_start"]
    else:
        blocks = response.json()["content"]
    (id,) = [block["id"] for block in blocks if block["type"] == "tool_use"]
    history = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "tool_use", "id": id, "name": "deploy", "input": json.loads(back)},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": "done"}]},
    ]
    counted = await g.http.post("/v1/messages/count_tokens", json={**body, "messages": history})
    second = await g.http.post("/v1/messages", json={**body, "messages": history})
    assert counted.json()["input_tokens"] == len(g.engines.calls[-1].prompt)
    return second.json()["usage"]["cache_read_input_tokens"]


async def responses(g: Gateway, stream: bool, back: str) -> int:
    tools = [{"type": "function", "name": "deploy", "parameters": SCHEMA}]
    response = await g.http.post("/v1/responses", json={"input": "Deploy.", "tools": tools, "stream": stream})
    if stream:
        told = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: ")]
        output = told[-1]["response"]["output"]
    else:
        output = response.json()["output"]
    items = [{**item, "arguments": back} if item["type"] == "function_call" else item for item in output]
    result = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "done"}
    history = [USER, *items, result]
    second = await g.http.post("/v1/responses", json={"input": history, "tools": tools})
    return second.json()["usage"]["input_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("turns", [chat, messages, responses])
async def test_the_second_turn_has_the_first_ones_call_in_the_cache(turns: Turns, stream: bool) -> None:
    async with gateway(deploying()) as g:
        cached = await turns(g, stream, ECHO)
        first, second = g.engines.calls
        assert cached == len(first.prompt) + len(ANSWER)
        assert second.prompt[:cached] == [*first.prompt, *ANSWER]


@pytest.mark.parametrize("turns", [chat, messages, responses])
async def test_a_changed_call_is_the_clients_in_every_family(turns: Turns) -> None:
    async with gateway(deploying()) as g:
        await turns(g, False, '{"note": "changed"}')
        text = prompt_of(g.engines.calls[1])
        assert f"Hm.\n</think>\n\n{call('deploy', note='changed')}<|im_end|>" in text
        assert RAW not in text


async def test_a_custom_tools_call() -> None:
    """Its arguments are a text on the way to the client and back."""
    raw = call("patch", input="\nä </tool_call> 😀\n").replace("<function", " <function")
    engines = tiny_engines()
    engines.on_call = lambda c: c._deliver(tuple(encode(f"Hm.\n</think>\n\n{raw}<|im_end|>")), "stop")
    async with gateway(engines) as g:
        body = {"tools": [{"type": "custom", "name": "patch"}]}
        output = (await g.http.post("/v1/responses", json={**body, "input": "Go."})).json()["output"]
        result = {"type": "custom_tool_call_output", "call_id": output[-1]["call_id"], "output": "done"}
        given = [{"role": "user", "content": "Go."}, *output, result]
        await g.http.post("/v1/responses", json={**body, "input": given})
        assert f"{raw}<|im_end|>" in prompt_of(g.engines.calls[1])


async def test_a_restarted_gateway_knows_the_calls_and_another_model_does_not(tmp_path: Path) -> None:
    path = str(tmp_path / "s.db")
    tools = [{"type": "function", "function": {"name": "deploy", "parameters": SCHEMA}}]
    async with gateway(deploying(), path) as g:
        message = (await g.chat(model=TINY, messages=[USER], tools=tools)).json()["choices"][0]["message"]
        (sent,) = message["tool_calls"]
        assert await g.deps.sessions.flush(5)
    sent["function"]["arguments"] = ECHO
    history = [USER, message, {"role": "tool", "tool_call_id": sent["id"], "content": "done"}]
    async with gateway(deploying(), path) as g:
        await g.chat(model=TINY, messages=history, tools=tools)
        (second,) = g.engines.calls
        assert RAW in prompt_of(second)
        g.engines.cards[0] = replace(g.engines.cards[0], tokenizer_digest="other")
        await g.chat(model=TINY, messages=history, tools=tools)
        assert RAW not in prompt_of(g.engines.calls[1])


async def test_a_database_that_cannot_be_read_costs_no_answer(tmp_path: Path) -> None:
    (tmp_path / "s.db").write_bytes(b"this is no database" * 1000)
    async with gateway(deploying(), str(tmp_path / "s.db")) as g:
        unknown = {"id": "call_x", "type": "function", "function": {"name": "deploy", "arguments": ECHO}}
        history = [USER, {"role": "assistant", "tool_calls": [unknown]}]
        assert (await g.chat(model=TINY, messages=history)).status_code == 200
        assert await chat(g, False, ECHO) > 0, "in memory"


def heard(text: str, **functions: dict[str, Any]) -> list[list[CallRecord]]:
    """What is heard of a text, for several ways to cut it."""
    found = []
    for cut in cuts_of(text):
        kept: list[CallRecord] = []
        hearing = HeardCalls("language", kept.append)
        for delta in deltas_of(cut, tools(**functions)):
            hearing.hear([delta])
        found.append(kept)
    return found


def test_calls_are_heard_whole() -> None:
    read = call("read", path="a")
    for first, second in heard(f"Well.\n\n{RAW}\n{read}", deploy=SCHEMA["properties"], read={}):
        assert (first.name, first.raw, json.loads(first.arguments)) == ("deploy", RAW, json.loads(ECHO))
        assert (second.name, second.raw, second.arguments) == ("read", read, '{"path": "a"}')
        assert first.id != second.id


def test_calls_that_drifted_or_broke_off_are_not_kept() -> None:
    read = call("read", path="a")
    assert not any(heard(read.removesuffix("</tool_call>"), read={}))
    assert not any(heard(read.removeprefix("<tool_call>\n"), read={}))
    assert all(len(kept) == 1 for kept in heard('<tool_call>{"name":"read","arguments":{}}</tool_call>', read={}))


def record(id: str, size: int = 100) -> CallRecord:
    return CallRecord(id, "language", "deploy", "{}", "x" * (size - 2))


def history(*ids: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": "", "tool_calls": [{"id": id} for id in ids]}]


def written(path: Path) -> list[str]:
    reader = sqlite3.connect(path)
    try:
        return [id for (id,) in reader.execute("SELECT id FROM tool_calls ORDER BY number")]
    finally:
        reader.close()


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        (RowBounds(), ["c0", "c1", "c2", "c3", "c4", "c5"]),
        (RowBounds(rows=3), ["c3", "c4", "c5"]),
        (RowBounds(bytes=200), ["c4", "c5"]),
        (RowBounds(bytes=299), ["c4", "c5"]),
        (RowBounds(rows=1, bytes=200), ["c5"]),
        (RowBounds(bytes=99), []),
        (RowBounds(rows=0), []),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_the_oldest_go(tmp_path: Path, bounds: RowBounds, kept: list[str], at_once: bool) -> None:
    sessions = SessionStore(str(tmp_path / "s.db"), 1000, calls=bounds)
    await sessions.start()
    for number in range(6):
        sessions.keep_call(record(f"c{number}"))
        assert at_once or await sessions.flush(5)
    sessions.keep_call(record("c5"))  # a batch whose fate was unknown is written again
    assert await sessions.flush(5)
    assert written(tmp_path / "s.db") == kept
    assert sessions.dropped_rows == 0
    await sessions.close()


async def test_memory_holds_the_last_used_up_to_its_bound(tmp_path: Path) -> None:
    sessions = SessionStore(str(tmp_path / "s.db"), 1000)
    await sessions.start()
    memory = CallMemory(sessions, recent_bytes=300)
    for number in range(3):
        memory.keep(record(f"c{number}"))
    await memory.of(history("c0"), "language")
    memory.keep(record("c3"))
    memory.keep(record("huge", 301))
    assert (list(memory._recent), memory._bytes) == ([], 0)
    assert await sessions.flush(5)
    found = await memory.of(history("c0", "huge", "unknown", "c1"), "language")
    assert found == {"c0": record("c0"), "c1": record("c1"), "huge": record("huge", 301)}
    assert await memory.of(history("c0"), "another") == {}
    assert memory._bytes == sum(one.size for one in memory._recent.values()) <= 300
    await sessions.close()


async def test_many_calls_are_looked_up_at_once(tmp_path: Path) -> None:
    sessions = SessionStore(str(tmp_path / "s.db"), 1000)
    await sessions.start()
    ids = [f"c{number}" for number in range(1200)]
    for id in ids:
        sessions.keep_call(record(id))
    assert await sessions.flush(5)
    assert sorted(await CallMemory(sessions).of(history(*ids, "unknown"), "language")) == sorted(ids)
    await sessions.close()
