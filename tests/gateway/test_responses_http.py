"""The Responses API over HTTP: events and their order, whole answers, what is refused and how."""

import asyncio
import json
from typing import Any

import pytest
from msgspec.structs import replace

from services.gateway.engine_errors import EngineRejected
from services.gateway.responses.request import MAX_METADATA
from tests.gateway.fake_engines import WAIT, FakeEngines
from tests.gateway.http_gateway import gateway
from tests.gateway.responses_rig import (
    PATCH,
    PATCH_CALL,
    PATCH_TEXT,
    READ,
    READ_CALL,
    TINY,
    Events,
    plain,
    post,
    prompt_of,
    saying,
)
from tests.gateway.tiny import encode, tiny_card, tiny_engines

THOUGHTS = "I should read.\n</think>\n\n"


@pytest.mark.parametrize("cut", [1, 3, 1000])
async def test_events_and_their_order(cut: int) -> None:
    async with gateway(saying(f"{THOUGHTS}Let me see.\n\n{READ_CALL}\n{PATCH_CALL}", cut=cut)) as g:
        events = Events.of((await post(g, input="Hi", tools=[READ, PATCH], stream=True)).text)
        text = ["content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
        assert events.types == [
            "created",
            "in_progress",
            "output_item.added",
            *(name.format("reasoning_text") for name in text),
            "output_item.added",
            *(name.format("output_text") for name in text),
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "output_item.added",
            "custom_tool_call_input.delta",
            "custom_tool_call_input.done",
            "output_item.done",
            "completed",
        ]
        output = events.final["output"]
        assert [event["item"] for event in events.of_type("output_item.done")] == output
        assert [event["output_index"] for event in events.of_type("output_item.added")] == [0, 1, 2, 3]
        assert all(event["item"]["status"] == "in_progress" for event in events.of_type("output_item.added"))
        assert len({item["id"] for item in output}) == 4
        arguments = {"path": "a.py", "lines": 3}
        assert json.loads(output[2].pop("arguments")) == arguments
        assert plain(output) == [
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "I should read."}],
                "encrypted_content": None,
                "status": "completed",
            },
            {
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}],
            },
            {"type": "function_call", "name": "read", "status": "completed"},
            {"type": "custom_tool_call", "name": "apply_patch", "input": PATCH_TEXT, "status": "completed"},
        ]
        for kind, field, whole in (
            ("reasoning_text", "text", "I should read."),
            ("output_text", "text", "Let me see."),
            ("function_call_arguments", "arguments", None),
            ("custom_tool_call_input", "input", PATCH_TEXT),
        ):
            (done,) = events.of_type(f"{kind}.done")
            deltas = events.of_type(f"{kind}.delta")
            assert "".join(delta["delta"] for delta in deltas) == done[field]
            assert whole is None or done[field] == whole
            assert {delta["item_id"] for delta in deltas} == {done["item_id"]} == {output[done["output_index"]]["id"]}


async def test_whole_and_streamed_are_the_same() -> None:
    async with gateway(saying(f"{THOUGHTS}Look.\n\n{READ_CALL}\n{PATCH_CALL}")) as g:
        fields = {"input": "Hi", "tools": [READ, PATCH], "instructions": "Be kind.", "metadata": {"a": "b"}}
        streamed = Events.of((await post(g, stream=True, **fields)).text).final
        whole = (await post(g, **fields)).json()
        for response in (streamed, whole):
            response["output"] = plain(response["output"])
            assert response.pop("id").startswith("resp_")
            assert response.pop("completed_at") >= response.pop("created_at")
        assert streamed == whole
        assert whole["status"] == "completed"
        assert (whole["instructions"], whole["metadata"], whole["tools"]) == ("Be kind.", {"a": "b"}, [READ, PATCH])
        usage = whole["usage"]
        assert usage["input_tokens"] == len(g.engines.calls[0].prompt)
        assert usage["input_tokens_details"]["cached_tokens"] == 7
        assert usage["output_tokens_details"]["reasoning_tokens"] == len(encode("I should read.\n</think>"))
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


async def test_an_answer_cut_by_the_limit_is_incomplete() -> None:
    async with gateway(saying("Hm.\n</think>\n\nOnce upon", finish="length")) as g:
        events = Events.of((await post(g, input="Hi", max_output_tokens=9, stream=True)).text)
        assert events.types[-1] == "incomplete"
        assert events.final["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["status"] for item in events.final["output"]] == ["completed", "incomplete"]
        assert g.engines.calls[0].sampling.max_tokens == 9


async def test_keepalives_are_events() -> None:
    async with gateway(tiny_engines(), keepalive=0.02) as g:
        asked = asyncio.create_task(post(g, input="Hi", stream=True, reasoning={"effort": "none"}))
        call = await g.engines.called()
        await asyncio.sleep(0.2)
        call.say(encode("Hello!"))
        call.finish("length")
        events = Events.of((await asked).text)
        alive = [event for event in events.all if event["type"] == "response.in_progress"]
        assert len(alive) > 2
        assert all(event["response"]["status"] == "in_progress" for event in alive)


async def test_an_engine_that_fails_ends_the_stream_with_failed() -> None:
    async with gateway(tiny_engines()) as g:
        asked = asyncio.create_task(post(g, input="Hi", stream=True, reasoning={"effort": "none"}))
        call = await g.engines.called()
        call.say(encode("Half"))
        call.finish("error", "The device is gone.")
        events = Events.of((await asked).text)
        assert events.types[-1] == "failed"
        assert events.final["status"] == "failed"
        assert events.final["error"]["message"] == "The device is gone."
        assert events.final["output"][0]["status"] == "incomplete"
        assert (await g.http.get(f"/v1/responses/{events.final['id']}")).status_code == 404


async def test_an_overflow_is_failed_within_a_stream_and_a_400_without() -> None:
    engines = tiny_engines()
    engines.cards = [replace(tiny_card(), max_model_len=64)]
    async with gateway(engines) as g:
        long = "word " * 200
        streamed = await post(g, input=long, stream=True)
        assert streamed.status_code == 200
        assert streamed.headers["content-type"].startswith("text/event-stream")
        events = Events.of(streamed.text)
        assert events.types == ["created", "in_progress", "failed"]
        assert events.final["error"]["code"] == "context_length_exceeded"
        assert "maximum context length is 64 tokens" in events.final["error"]["message"]
        whole = await post(g, input=long)
        assert whole.status_code == 400
        assert whole.json()["error"]["code"] == "context_length_exceeded"
        assert whole.json()["error"]["message"] == events.final["error"]["message"]
        assert await g.sample("errors_total", type="context_length_exceeded") == 2


async def test_overload_is_a_503_also_for_a_stream() -> None:
    async with gateway(saying("x")) as g:
        g.engines.refusal = EngineRejected("overloaded", "The queue is full.", 2.0)
        response = await post(g, input="Hi", stream=True)
        assert (response.status_code, response.headers["retry-after"]) == (503, "2")
        assert response.json()["error"]["code"] == "server_is_overloaded"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "text.format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "read"}}, "tool_choice"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {str(n): "" for n in range(MAX_METADATA + 1)}}, "metadata"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "robot", "content": "Hi"}]}, "input[0].role"),
        ({"input": [{"content": "Hi"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": ["Hi"]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": ""}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ],
)
async def test_what_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with gateway(saying("x")) as g:
        for stream in (False, True):
            body: dict[str, Any] = {"input": "Hi", "stream": stream, **fields}
            response = await post(g, **body)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == param
        assert not g.engines.calls


async def test_what_is_accepted_without_effect() -> None:
    async with gateway(saying("Hello!")) as g:
        response = await post(
            g,
            input=[{"role": "user", "content": "Hi"}, {"type": "web_search_call", "id": "ws"}, {"type": "new_thing"}],
            tools=[{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []}, {"type": "mcp"}],
            include=["reasoning.encrypted_content"],
            parallel_tool_calls=True,
            truncation="auto",
            text={"format": {"type": "text"}, "verbosity": "low"},
            service_tier="flex",
            client_metadata={"a": 1},
            background=False,
            reasoning={"effort": "none", "summary": "auto"},
            store=None,
        )
        assert response.status_code == 200, response.text
        assert "tool" not in prompt_of(g.engines.calls[0])


async def test_the_path_without_a_version_and_the_main_model_by_default() -> None:
    async with gateway(saying("Hello!")) as g:
        response = await g.http.post("/responses", json={"input": "Hi", "reasoning": {"effort": "none"}})
        assert response.json()["model"] == TINY
        stored = await g.http.get(f"/responses/{response.json()['id']}")
        assert stored.json() == response.json()


async def test_tools_that_must_not_be_called_stay_in_the_prompt() -> None:
    async with gateway(saying(READ_CALL)) as g:
        fields = {"input": "Hi", "tools": [READ], "reasoning": {"effort": "none"}}
        free = (await post(g, **fields)).json()
        bound = (await post(g, tool_choice="none", **fields)).json()
        assert [item["type"] for item in free["output"]] == ["function_call"]
        assert [item["type"] for item in bound["output"]] == ["message"]
        assert g.engines.calls[0].prompt == g.engines.calls[1].prompt


async def test_codex() -> None:
    """A second turn of Codex's, with all that it sends: no ids, no statuses, and headers for the session."""
    async with gateway(saying(f"{THOUGHTS}Now.\n\n{PATCH_CALL}")) as g:
        body = {
            "model": TINY,
            "instructions": "You are Codex.",
            "input": [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<cwd>/a</cwd>"}]},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
                {
                    "type": "reasoning",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "Where is it?"}],
                    "encrypted_content": None,
                },
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "I look."}],
                },
                {
                    "type": "function_call",
                    "name": "read",
                    "arguments": '{"path":"a.py"}',
                    "call_id": "call_1",
                },
                {"type": "function_call_output", "call_id": "call_1", "output": "x = 1"},
                {"type": "custom_tool_call", "name": "apply_patch", "input": "bad", "call_id": "call_2"},
                {
                    "type": "custom_tool_call_output",
                    "call_id": "call_2",
                    "output": [{"type": "input_text", "text": "no such file"}],
                },
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Plan mode."}]},
            ],
            "tools": [READ, PATCH, {"type": "web_search"}, {"type": "namespace", "name": "n"}],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "thread-7",
            "client_metadata": {},
        }
        headers = {"session-id": "s", "thread-id": "thread-7", "x-codex-window-id": "thread-7:0"}
        response = await g.http.post("/v1/responses", json=body, headers=headers)
        events = Events.of(response.text)
        kinds = [item["type"] for item in events.final["output"]]
        assert kinds == ["reasoning", "message", "custom_tool_call"]
        call = g.engines.calls[0]
        assert call.session_id == "thread-7"
        prompt = prompt_of(call)
        assert prompt.index("You are Codex.\n\nSandboxed.") < prompt.index("<cwd>/a</cwd>")
        assert prompt.index("no such file") < prompt.index("Plan mode.")
        assert "start: begin hunk+ end" in prompt
        assert (await g.http.get(f"/v1/responses/{events.final['id']}")).status_code == 404, "store is false"


async def test_a_history_of_items_renders_as_the_same_chat() -> None:
    function = {key: READ[key] for key in ("name", "description", "parameters")}
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Read a."},
        {"role": "assistant", "content": "So.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
        {"role": "assistant", "content": "It is x."},
        {"role": "user", "content": "And b?"},
    ]
    items = [
        {"role": "user", "content": "Read a."},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "So."},
        {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"path":"a"}'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "x"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "It is x."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "And b?"}]},
    ]
    async with gateway(saying("Hello!")) as g:
        await g.chat(model=TINY, messages=messages, tools=[{"type": "function", "function": function}])
        await post(g, instructions="Be kind.", input=items, tools=[READ])
        chat, response = g.engines.calls
        assert response.prompt == chat.prompt


async def test_a_client_that_leaves_stops_the_engine_and_stores_nothing() -> None:
    async with gateway(FakeEngines()) as g:
        body = {"input": "Hi", "stream": True}
        async with g.http.stream("POST", "/v1/responses", json=body) as response:
            assert response.status_code == 200
            first = await anext(response.aiter_lines())
            assert first == "event: response.created"
        call = await g.engines.called()
        await asyncio.wait_for(call.cancelled.wait(), 5)


async def test_a_request_that_is_sent_again_takes_the_answer_over() -> None:
    async with gateway(tiny_engines()) as g:

        async def ask() -> Events:
            body = {"model": TINY, "input": "Hi", "stream": True, "reasoning": {"effort": "none"}}
            response = await g.http.post("/v1/responses", json=body, headers={"thread-id": "thread-7"})
            return Events.of(response.text)

        asked = asyncio.create_task(ask())
        call = await g.engines.called()
        call.say(encode("Hel"))
        again = asyncio.create_task(ask())
        earlier = await asyncio.wait_for(asked, WAIT)
        assert earlier.types[-1] == "failed"
        call.say(encode("lo!"))
        call.finish("length")
        later = (await asyncio.wait_for(again, WAIT)).final
        assert later["output"][0]["content"][0]["text"] == "Hello!"
        assert len(g.engines.calls) == 1
        assert (await g.http.get(f"/v1/responses/{later['id']}")).status_code == 200
