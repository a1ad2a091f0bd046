"""The cases that other engines broke on, through HTTP, NATS and a scripted engine, in every API family."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.e2e import families
from tests.e2e.cases import CALLS, SIZES
from tests.e2e.families import Said
from tests.e2e.stack import Stack
from tests.gateway.http_gateway import events
from tests.gateway.output_rig import CASES
from tests.gateway.responses_rig import Events
from tests.gateway.test_messages_http import sse

COMPLETE = {families.chat: "tool_calls", families.messages: "tool_use", families.responses: "completed"}
CUT = {families.chat: "length", families.messages: "max_tokens", families.responses: "incomplete"}
OTHERS = (families.messages, families.responses)


@pytest.fixture
async def http(scripted: Stack) -> AsyncIterator[httpx.AsyncClient]:
    places = httpx.Limits(max_connections=8)  # as many as the engine has
    async with httpx.AsyncClient(base_url=scripted.url, timeout=60, limits=places) as client:
        yield client


@pytest.mark.parametrize("name", [name for name in CALLS if name != "T11"])
async def test_calls_at_every_cut(name: str, http: httpx.AsyncClient) -> None:
    given, expected = CASES[name]["input"], CASES[name]["expected"]
    asked = [(families.chat, size, True) for size in SIZES]
    asked += [(family, size, True) for family in OTHERS for size in (4, 0)]
    asked += [(family, 7, False) for family in COMPLETE]
    answers: list[Said] = await asyncio.gather(
        *(family(http, f"{name} by {size}.", given["tools"], stream=stream) for family, size, stream in asked)
    )
    wanted = [(call["name"], call["arguments"]) for call in expected["tool_calls"]]
    for (family, size, stream), said in zip(asked, answers, strict=True):
        where = (family.__name__, size, stream)
        assert said.text == expected["content"], where
        assert [(name, json.loads(arguments)) for name, arguments in said.calls] == wanted, where
        assert said.finish == COMPLETE[family], where
    ids = [id for said in answers for id in said.ids]
    assert len(set(ids)) == len(ids) == len(wanted) * len(answers)


async def test_a_call_that_the_limit_cuts(http: httpx.AsyncClient) -> None:
    tools, expected = CASES["T11"]["input"]["tools"], CASES["T11"]["expected"]["non_streaming"]
    for family, finish in CUT.items():
        whole = await family(http, "T11 by 5.", tools, stream=False)
        assert (whole.text, whole.calls, whole.finish) == (expected["content"], expected["tool_calls"], finish)
        cuts = await asyncio.gather(*(family(http, f"T11 by {size}.", tools, stream=True) for size in SIZES))
        for cut in cuts:
            assert (cut.text, cut.finish) == ("", finish)
            assert cut.calls == [("write_file", '{"path": "/w/a", "content": "line one\\nline tw')]


async def test_two_calls_in_one_delta(http: httpx.AsyncClient) -> None:
    tools = {name: {"type": "object", "properties": p} for name, p in CASES["T07"]["input"]["tools"].items()}
    body = {
        "messages": [{"role": "user", "content": "T07 as it came."}],
        "tools": [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in tools.items()],
        "stream": True,
    }
    chunks = events((await http.post("/v1/chat/completions", json=body)).text)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == ""
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    indexes = [call["index"] for call in calls]
    assert indexes == sorted(indexes)
    for index, wanted in enumerate(CASES["T07"]["expected"]["tool_calls"]):
        first, *later = [call for call in calls if call["index"] == index]
        assert (first["type"], first["function"]["name"], bool(first["id"])) == ("function", wanted["name"], True)
        assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in later)
        arguments = "".join(call["function"]["arguments"] for call in (first, *later))
        assert json.loads(arguments) == wanted["arguments"]


@pytest.mark.parametrize("stream", [True, False])
async def test_characters_that_tokens_cut(stream: bool, http: httpx.AsyncClient) -> None:
    for family in COMPLETE:
        assert (await family(http, "T12 whole.", {}, stream=stream)).text == CASES["T12"]["expected"]["text"]
        assert (await family(http, "T12 half.", {}, stream=stream)).text == "Hi \ufffd"
    if stream:
        chunks = events((await http.post("/v1/chat/completions", json=_asking("T12 whole."))).text)
        deltas = [c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]]
        assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("cut", ["pieces", "block"])
async def test_a_stop_string_over_tokens(cut: str, stream: bool, http: httpx.AsyncClient) -> None:
    stop, wanted = CASES["T13"]["input"]["stop"], CASES["T13"]["expected"]
    said = await families.chat(http, f"T13 {cut}.", {}, stream=stream, stop=stop)
    assert (said.text, said.finish) == (wanted["text"], wanted["finish_reason"])
    said = await families.messages(http, f"T13 {cut}.", {}, stream=stream, stop_sequences=stop)
    assert (said.text, said.finish) == (wanted["text"], "stop_sequence")
    body = _asking(f"T13 {cut}.") | {"stop": stop, "stream_options": {"include_usage": True}}
    chunks = events((await http.post("/v1/chat/completions", json=body)).text)
    assert not any("own" in choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    # A byte is a token here; what lies behind the stop string is not counted.
    assert chunks[-1]["usage"]["completion_tokens"] == len("The quick brown fox")


async def test_a_stop_token_amid_a_block(http: httpx.AsyncClient) -> None:
    """Six tokens come in one step, and the third one ends the answer. The prompt is such that the six, but not the
    three, would fill a block of the cache: nobody may find that one."""
    for family, finish in {families.chat: "stop", families.messages: "end_turn"}.items():
        for stream in (True, False):
            said = await family(http, "T14.", {}, stream=stream)
            assert (said.text, said.finish) == ("AB", finish)
    short = _asking("T14.") | {"stream": False}
    tokens = (await http.post("/v1/chat/completions", json=short)).json()["usage"]["prompt_tokens"]
    asked = {"role": "user", "content": "T14." + "." * (-(tokens + 5) % 64 + 64)}
    first = (await http.post("/v1/chat/completions", json=short | {"messages": [asked]})).json()
    (choice,), usage = first["choices"], first["usage"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("AB", "stop")
    assert usage["completion_tokens"] == 3
    assert (usage["prompt_tokens"] + 3) // 64 + 1 == (usage["prompt_tokens"] + 6) // 64
    for answer in ("AB", "AB<|im_end|>CDE"):
        history = [asked, {"role": "assistant", "content": answer}, {"role": "user", "content": "T14. Again?"}]
        again = (await http.post("/v1/chat/completions", json=short | {"messages": history})).json()
        assert again["choices"][0]["message"]["content"] == "AB"
        found = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert found == usage["prompt_tokens"] // 64 * 64


async def test_arguments_keep_the_order_of_the_model(http: httpx.AsyncClient) -> None:
    given = CASES["T17"]["input"]
    tools = {"deploy": {name: {"type": kind} for name, kind in given["schema"].items()}}
    wanted = json.loads(given["client_echo_turn2"]["tool_calls"][0]["function"]["arguments"])
    for family in COMPLETE:
        for stream in (True, False):
            ((name, arguments),) = (await family(http, "T17.", tools, stream=stream)).calls
            assert (name, json.loads(arguments)) == ("deploy", wanted)
            assert list(json.loads(arguments)) == ["opts", "dry_run", "note"]


async def test_an_overflow_tells_its_numbers_before_any_header(http: httpx.AsyncClient) -> None:
    limit = (await http.get("/v1/models")).json()["data"][0]["max_model_len"]
    text = "x" * limit
    counted = await http.post("/v1/messages/count_tokens", json={"messages": [{"role": "user", "content": text}]})
    tokens = counted.json()["input_tokens"]
    wanted = CASES["T20"]["expected"]["openai_body"]["error"]
    message = wanted["message"].replace("4096", str(limit)).replace("4097", str(tokens))
    chat = await http.post("/v1/chat/completions", json=_asking(text))
    assert (chat.status_code, chat.headers["content-type"]) == (400, "application/json")
    assert chat.json()["error"] == {**wanted, "message": message}
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 512, "stream": True}
    refused = await http.post("/v1/messages", json=body)
    assert (refused.status_code, refused.headers["content-type"]) == (400, "application/json")
    error = {"type": "invalid_request_error", "message": message}
    assert refused.json() == {"type": "error", "error": error}
    assert f"prompt is too long: {tokens} tokens > {limit} maximum" in message
    # Codex knows an overflow by this event only.
    failed = Events.of((await http.post("/v1/responses", json={"input": text, "stream": True})).text)
    assert failed.all[-1]["type"] == "response.failed"
    assert failed.final["error"] == {"code": "context_length_exceeded", "message": message}


async def test_usage_of_a_repeated_prompt_in_every_family(http: httpx.AsyncClient) -> None:
    text = "T12 whole. " + "Again and again. " * 8
    options: list[dict[str, Any]] = CASES["T21"]["input"]["requests"]
    shown = {"stream_options": {"include_usage": True}}
    for turn in range(2):
        chunks = events((await http.post("/v1/chat/completions", json=_asking(text) | shown)).text)
        usage = chunks[-1]["usage"]
        assert chunks[-1]["choices"] == []
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert (cached > 0) is bool(turn)
    for fields in options:
        if fields.get("stream_options") != {"include_usage": True} and "anthropic" not in fields:
            chunks = events((await http.post("/v1/chat/completions", json=_asking(text) | fields)).text)
            assert not any("usage" in chunk for chunk in chunks)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 99, "stream": True}
    found = sse((await http.post("/v1/messages", json=body)).text)
    (start,) = (event["message"]["usage"] for event in found if event["type"] == "message_start")
    (end,) = (event["usage"] for event in found if event["type"] == "message_delta")
    split = {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }
    assert start == {**split, "output_tokens": 0}
    own = end.pop("samovar")
    assert own["cached_device"] + own["cached_host"] == cached
    assert end == {**split, "output_tokens": usage["completion_tokens"]}
    final = (await http.post("/v1/responses", json={"input": text})).json()["usage"]
    assert (final["input_tokens"], final["input_tokens_details"]["cached_tokens"]) == (usage["prompt_tokens"], cached)


def _asking(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "stream": True}
