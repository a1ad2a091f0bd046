"""Anthropic's Messages API over HTTP: events, blocks, usage, errors, counts; the model's words are the test's."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from services.gateway.engine_errors import EngineRejected
from services.protocol.generate import FinishReason
from tests.gateway.fake_engines import MODEL, Call, FakeEngines, card
from tests.gateway.http_gateway import Gateway, gateway
from tests.gateway.tiny import decode, encode, tiny_engines

USER = {"role": "user", "content": "Hi"}
READ = {
    "name": "read",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}},
    "cache_control": {"type": "ephemeral"},
}
CALL = (
    "<tool_call>\n<function=read>\n<parameter=path>\na.py\n</parameter>\n<parameter=lines>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
ON = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def saying(text: str, finish: FinishReason = "stop", **usage: Any) -> FakeEngines:
    engines = tiny_engines()

    def play(call: Call) -> None:
        tokens = tuple(encode(text + ("<|im_end|>" if finish == "stop" else "")))
        call._deliver(tokens, finish, **usage)

    engines.on_call = play
    return engines


async def ask(g: Gateway, headers: dict[str, str] | None = None, path: str = "/v1/messages", **fields: Any):
    body = {"model": "claude-sonnet-4-5", "max_tokens": 100, "messages": [USER], **fields}
    return await g.http.post(path, json={k: v for k, v in body.items() if v is not None}, headers=headers)


def sse(text: str) -> list[dict[str, Any]]:
    """Events whose name is their data's type."""
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def assemble(events: list[dict[str, Any]], parse: bool = True) -> dict[str, Any]:
    """The message that a stream's events build, with the order of the events checked. `parse`: inputs of calls are
    whole, and given as objects."""
    assert events[0]["type"] == "ping"
    events = [e for e in events if e["type"] != "ping"]
    assert events[0]["type"] == "message_start"
    message = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    inputs: list[str] = []
    open_block = False
    begun = message["usage"]
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert not open_block
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                inputs.append("")
                open_block = True
            case "content_block_delta":
                assert open_block
                assert event["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], event["delta"]
                match delta["type"]:
                    case "input_json_delta":
                        inputs[-1] += delta["partial_json"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case kind:
                        block[kind.removesuffix("_delta")] += delta[kind.removesuffix("_delta")]
            case "content_block_stop":
                assert open_block
                assert event["index"] == len(message["content"]) - 1
                open_block = False
            case "message_delta":
                assert not open_block
                message |= event["delta"]
                message["usage"] = event["usage"]
                standard = {name: count for name, count in event["usage"].items() if name != "samovar"}
                assert {**begun, "output_tokens": 0} == {**standard, "output_tokens": 0}
    assert events[-1] == {"type": "message_stop"}
    for block, text in zip(message["content"], inputs, strict=True):
        if block["type"] == "tool_use":
            block["input"] = json.loads(text) if parse else text
    return message


async def both(g: Gateway, **fields: Any) -> dict[str, Any]:
    """The whole message, which the streamed one is checked to equal."""
    whole = (await ask(g, **fields)).json()
    streamed = await ask(g, stream=True, **fields)
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    message = assemble(sse(streamed.text))
    for one in (whole, message):
        assert one.pop("id").startswith("msg_")
        for block in one["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id")
            if block["type"] == "thinking":
                assert block.pop("signature")
    assert message == whole
    return whole


def prompt_of(g: Gateway) -> str:
    return decode(g.engines.calls[-1].prompt)


async def test_thoughts_text_and_calls_are_blocks_in_their_order() -> None:
    async with gateway(saying(f"Hm.\n</think>\n\nLet me see.\n\n{CALL}\n{CALL}", cached_device=5, cached_host=2)) as g:
        message = await both(g, tools=[READ], **ON)
        call = {"type": "tool_use", "name": "read", "input": {"path": "a.py", "lines": 3}}
        assert message["content"] == [
            {"type": "thinking", "thinking": "Hm."},
            {"type": "text", "text": "Let me see."},
            call,
            call,
        ]
        assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
        usage = message["usage"]
        assert usage["cache_read_input_tokens"] == 7
        assert usage["cache_creation_input_tokens"] == 0
        assert usage["input_tokens"] + 7 == len(g.engines.calls[0].prompt)
        assert usage["output_tokens"] == len(encode(f"Hm.\n</think>\n\nLet me see.\n\n{CALL}\n{CALL}<|im_end|>"))


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, False),
        ({"output_config": {"effort": "high"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        ({"thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "high"}}, True),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"thinking": True}}, True),
    ],
)
async def test_a_model_thinks_where_it_is_told_to(fields: dict[str, Any], thinks: bool) -> None:
    async with gateway(saying("Hello!")) as g:
        assert (await ask(g, **fields)).status_code == 200
        assert prompt_of(g).endswith("<think>\n") is thinks


async def test_stop_reasons() -> None:
    async with gateway(saying("One two three")) as g:
        message = await both(g, stop_sequences=["xyz", " two"])
        assert message["content"] == [{"type": "text", "text": "One"}]
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", " two")
        assert (await both(g))["stop_reason"] == "end_turn"
    async with gateway(saying("One two", "length")) as g:
        assert (await both(g))["stop_reason"] == "max_tokens"
    async with gateway(saying("")) as g:
        assert (await both(g))["content"] == []


async def test_pings_come_at_once_and_message_start_with_the_first_token() -> None:
    async with gateway(keepalive=0.05) as g:
        body = {"model": MODEL, "max_tokens": 9, "messages": [USER], "stream": True}
        async with g.http.stream("POST", "/v1/messages?beta=true", json=body) as response:
            call = await g.engines.called()
            lines = (line async for line in response.aiter_lines() if line.startswith("data: "))
            types = [json.loads((await asyncio.wait_for(anext(lines), 5))[6:])["type"] for _ in range(4)]
            assert types == ["ping", "ping", "ping", "ping"]
            call.say("now", cached=3)
            call.finish(cached_host=3)
            rest = [json.loads(line[6:]) async for line in lines]
        rest = [e for e in rest if e["type"] != "ping"]
        usage = {"input_tokens": len(call.prompt) - 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 3}
        assert rest[0]["message"]["usage"] == {**usage, "output_tokens": 0}
        assert rest[-2]["usage"].pop("samovar")["cached_host"] == 3
        assert rest[-2]["usage"] == {**usage, "output_tokens": 4}
        assert [e["type"] for e in rest] == [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]


async def test_an_error_in_a_stream_is_its_last_event() -> None:
    async with gateway() as g:
        asked = asyncio.create_task(ask(g, stream=True))
        call = await g.engines.called()
        call.say("Half")
        call.finish("error", "The device is gone.")
        events = sse((await asked).text)
        assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "The device is gone."}}
        assert "message_stop" not in [e["type"] for e in events]


def error_of(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert response.headers["x-request-id"]
    return body["error"]["message"]


async def test_errors_have_anthropics_envelope_and_statuses() -> None:
    async with gateway(FakeEngines([card(max_model_len=64)]), api_keys=("key",)) as g:
        assert "x-api-key" in error_of(await ask(g), 401, "authentication_error")
        key = {"x-api-key": "key"}
        assert error_of(await ask(g, key, model="gpt"), 404, "not_found_error")
        assert error_of(await g.http.get("/v1/messages"), 405, "invalid_request_error")
        listed = await g.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert error_of(listed, 401, "authentication_error")
        long = await ask(g, {"Authorization": "Bearer key"}, messages=[{"role": "user", "content": "x" * 100}])
        message = error_of(long, 400, "invalid_request_error")
        assert "prompt is too long: " in message
        assert message.endswith(" tokens > 64 maximum).")
        g.engines.refusal = EngineRejected("overloaded", "The queue is full.", 2.5)
        for stream in (True, False):
            full = await ask(g, key, stream=stream)
            assert error_of(full, 529, "overloaded_error") == "The queue is full."
            assert full.headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "read"}}, "tool_choice"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": ""}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
            "messages[0].content[0].content[0] ",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "riddle"}]}]}, "messages[0].content[0] "),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].name"),
    ],
)
async def test_what_cannot_be_used_is_a_400_that_names_it(fields: dict[str, Any], named: str) -> None:
    async with gateway(saying("")) as g:
        assert error_of(await ask(g, **fields), 400, "invalid_request_error").startswith(named)
        assert error_of(await ask(g, path="/v1/messages/count_tokens", **fields), 400, "invalid_request_error")
        assert g.engines.calls == []


async def test_a_conversation_of_an_agent_is_the_chat_that_the_other_api_renders() -> None:
    ours = [
        {"role": "user", "content": [{"type": "text", "text": "Read a.py", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "redacted_thinking", "data": "AAAA"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a.py"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "x = 1"}]},
                {"type": "text", "text": "Go on."},
            ],
        },
        {"role": "system", "content": "Mind the time."},
        {"role": "assistant", "content": [{"type": "text", "text": " "}]},
        {"role": "user", "content": "And?"},
    ]
    theirs = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Read a.py"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning": "Hm.",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "x = 1"},
        {"role": "user", "content": "Go on."},
        {"role": "system", "content": "Mind the time."},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "And?"},
    ]
    function = {"name": "read", "description": "Reads a file.", "parameters": READ["input_schema"]}
    server_tool = {"type": "web_search_20250305", "name": "web_search"}
    async with gateway(saying("Fine.")) as g:
        assert (await ask(g, system="Be brief.", messages=ours, tools=[READ, server_tool], **ON)).status_code == 200
        tools = [{"type": "function", "function": function}]
        assert (await g.chat(model="samovar-tiny", messages=theirs, tools=tools)).status_code == 200
        one, two = g.engines.calls
        assert decode(one.prompt) == decode(two.prompt)
        assert one.stream.request.hints == two.stream.request.hints


async def test_the_billing_block_reaches_neither_model_nor_cache() -> None:
    def system(mark: str) -> list[dict[str, Any]]:
        bill = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={mark};"}
        return [bill, {"type": "text", "text": "You are an agent."}, {"type": "text", "text": "Be brief."}]

    async with gateway(saying("Fine.")) as g:
        await ask(g, system=system("aaaaa"))
        await ask(g, system=system("bbbbb"))
        await ask(g, system=system("")[1:])
        await ask(g, system="You are an agent.\n\nBe brief.")
        assert len({tuple(call.prompt) for call in g.engines.calls}) == 1
        assert "billing" not in prompt_of(g)


async def test_a_failed_tool_says_so() -> None:
    def result(text: str, **fields: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": text, **fields}]}]

    async with gateway(saying("Fine.")) as g:
        await ask(g, messages=result("No such file", is_error=True))
        assert "Error: No such file" in prompt_of(g)
        await ask(g, messages=result("<tool_use_error>No</tool_use_error>", is_error=True))
        assert "Error: <tool_use_error>" not in prompt_of(g)
        await ask(g, messages=result("No such file"))
        assert "Error" not in prompt_of(g)
        assert (await ask(g, messages=result(None))).status_code == 200  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be brief.", "tools": [READ], **ON},
        {"messages": [USER, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "x" * 2500}]},
    ],
)
async def test_count_tokens_equals_the_later_input(fields: dict[str, Any]) -> None:
    async with gateway(saying("Fine.", cached_device=3)) as g:
        counted = (await ask(g, path="/v1/messages/count_tokens?beta=true", max_tokens=None, **fields)).json()
        assert g.engines.calls == []
        usage = (await ask(g, **fields)).json()["usage"]
        assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


async def test_count_tokens_counts_what_is_too_long() -> None:
    async with gateway(FakeEngines([card(max_model_len=64)])) as g:
        response = await ask(
            g, path="/v1/messages/count_tokens", model=MODEL, messages=[{"role": "user", "content": "x" * 3000}]
        )
        assert response.json()["input_tokens"] > 3000


async def test_unknown_fields_and_betas_change_nothing() -> None:
    async with gateway(saying("Fine.")) as g:
        await ask(g)
        response = await ask(
            g,
            {"anthropic-beta": "context-1m-2025-08-07,never-heard-of", "anthropic-version": "2099-01-01"},
            context_management={"edits": []},
            service_tier="auto",
            container=None,
            metadata={"user_id": None, "more": 1},
            riddle=True,
        )
        assert response.status_code == 200
        one, two = g.engines.calls
        assert one.prompt == two.prompt


async def test_tool_choice_none_forbids_calls() -> None:
    async with gateway(saying("Fine.")) as g:
        await ask(g, tools=[READ], tool_choice={"type": "none"})
        assert g.engines.calls[0].sampling.logit_bias == {encode("<tool_call>")[0]: -100.0}
        await ask(g, tools=[READ], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert g.engines.calls[1].sampling.logit_bias == {}


async def test_sessions_of_claude_code() -> None:
    as_json = json.dumps({"device_id": "d", "session_id": "from-json"})
    async with gateway(saying("Fine.")) as g:
        await ask(g, metadata={"user_id": as_json})
        await ask(g, metadata={"user_id": "user_abc_account__session_from-mark"})
        await ask(g, {"x-claude-code-session-id": "main"}, metadata={"user_id": as_json}, tools=[READ])
        await ask(g, {"x-claude-code-session-id": "main", "x-claude-code-agent-id": "sub"}, tools=[READ])
        assert [call.session_id for call in g.engines.calls] == ["from-json", "from-mark", "main", "main/sub"]
        assert await g.deps.sessions.flush(5)
        page = (await g.http.get("/api/sessions")).json()
        assert {s["id"]: s["parent"] for s in page["data"]}["main/sub"] == "main"
