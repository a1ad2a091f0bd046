"""Thoughts and tool calls of the family through HTTP, streamed and whole; the model's words are the test's."""

import json
from typing import Any, cast

import httpx
import openai
import pytest
from msgspec.structs import replace

from services.protocol.generate import FinishReason
from tests.gateway.fake_engines import Call, FakeEngines
from tests.gateway.http_gateway import Gateway, events, gateway
from tests.gateway.tiny import decode, encode, tiny_engines

READ = {
    "type": "function",
    "function": {
        "name": "read",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}},
    },
}
CALL = (
    "<tool_call>\n<function=read>\n<parameter=path>\na.py\n</parameter>\n<parameter=lines>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)


def saying(text: str, finish: FinishReason = "stop") -> FakeEngines:
    engines = tiny_engines()

    def play(call: Call) -> None:
        call._deliver(tuple(encode(text + ("<|im_end|>" if finish == "stop" else ""))), finish)

    engines.on_call = play
    return engines


async def ask(g: Gateway, **fields: Any) -> httpx.Response:
    response = await g.chat(None, model="samovar-tiny", **fields)
    assert response.status_code == 200, response.text
    return response


async def both(g: Gateway, **fields: Any) -> tuple[dict, str, dict]:
    """Message, finish reason and usage, of the whole answer; the streamed one is checked to be the same."""
    whole = (await ask(g, **fields)).json()
    chunks = events((await ask(g, stream=True, stream_options={"include_usage": True}, **fields)).text)
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert isinstance(choice["delta"], dict)
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    merge_calls(message.setdefault("tool_calls", []), value)
                elif name != "role":
                    message[name] = message.get(name, "") + value
    (choice,) = whole["choices"]
    for one in (message, choice["message"]):
        for call in one.get("tool_calls", []):
            assert call.pop("id").startswith("call_")
    assert message == choice["message"]
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == choice["finish_reason"]
    assert chunks[-1]["usage"]["completion_tokens_details"] == whole["usage"]["completion_tokens_details"]
    return message, choice["finish_reason"], whole["usage"]


def merge_calls(known: list[dict], deltas: list[dict]) -> None:
    for delta in deltas:
        assert "arguments" in delta["function"]
        if delta["index"] == len(known):
            known.append({"id": delta["id"], "type": delta["type"], "function": dict(delta["function"])})
        else:
            assert set(delta) == {"index", "function"}
            known[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]


async def test_thoughts_and_answer() -> None:
    async with gateway(saying("Hm, hello.\n</think>\n\nHello!")) as g:
        message, finish, usage = await both(g)
        assert message == {
            "role": "assistant",
            "content": "Hello!",
            "reasoning_content": "Hm, hello.",
            "reasoning": "Hm, hello.",
        }
        assert finish == "stop"
        thoughts = len(encode("Hm, hello.\n</think>"))
        assert usage["completion_tokens_details"] == {"reasoning_tokens": thoughts}
        assert usage["completion_tokens"] == len(encode("Hm, hello.\n</think>\n\nHello!<|im_end|>"))


async def test_without_thinking_there_are_no_thoughts() -> None:
    async with gateway(saying("Hello!")) as g:
        message, _, usage = await both(g, reasoning_effort="none")
        assert message == {"role": "assistant", "content": "Hello!"}
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_an_answer_cut_off_in_its_thoughts_has_empty_content() -> None:
    async with gateway(saying("Hm, well\n", "length")) as g:
        message, finish, usage = await both(g)
        assert (message["content"], message["reasoning"], finish) == ("", "Hm, well\n", "length")
        assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"]


async def test_a_tool_call() -> None:
    async with gateway(saying(f"I should read.\n</think>\n\nLet me see.\n\n{CALL}\n{CALL}")) as g:
        message, finish, _ = await both(g, tools=[READ])
        function = {"name": "read", "arguments": '{"path": "a.py", "lines": 3}'}
        assert message == {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "I should read.",
            "reasoning": "I should read.",
            "tool_calls": [{"type": "function", "function": function}] * 2,
        }
        assert finish == "tool_calls"


async def test_ids_of_calls_differ() -> None:
    async with gateway(saying(f"{CALL}\n{CALL}")) as g:
        answers = [(await ask(g, tools=[READ], enable_thinking=False)).json() for _ in range(2)]
        ids = [call["id"] for a in answers for call in a["choices"][0]["message"]["tool_calls"]]
        assert len(set(ids)) == 4


async def cut(g: Gateway) -> tuple[dict, list[dict]]:
    """The whole answer, and the chunks of the streamed one; both end with the reason `length`."""
    whole = (await ask(g, tools=[READ], enable_thinking=False)).json()
    chunks = events((await ask(g, tools=[READ], enable_thinking=False, stream=True)).text)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert whole["choices"][0]["finish_reason"] == choices[-1]["finish_reason"] == "length"
    return whole["choices"][0]["message"], [choice["delta"] for choice in choices]


async def test_a_call_cut_off_stays_unfinished_in_a_stream_and_is_not_shown_whole() -> None:
    async with gateway(saying(f"Look.\n\n{CALL[:-30]}", "length")) as g:
        message, deltas = await cut(g)
        assert message == {"role": "assistant", "content": "Look."}
        assert "".join(delta.get("content", "") for delta in deltas) == "Look."
        streamed: list[dict] = []
        for delta in deltas:
            merge_calls(streamed, delta.get("tool_calls", []))
        assert [call["function"]["arguments"] for call in streamed] == ['{"path": "a.py", "lines": ']


async def test_a_call_before_the_cut_is_shown_and_the_finish_is_length() -> None:
    async with gateway(saying(f"{CALL}\n{CALL[:-30]}", "length")) as g:
        message, _ = await cut(g)
        assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"path": "a.py", "lines": 3}']


async def test_calls_without_tools_are_content() -> None:
    async with gateway(saying(CALL)) as g:
        message, finish, _ = await both(g, enable_thinking=False)
        assert (message["content"], finish) == (CALL, "stop")


async def test_tool_choice_none_keeps_the_prompt_and_forbids_the_call() -> None:
    async with gateway(saying("Fine.")) as g:
        await ask(g, tools=[READ], enable_thinking=False)
        await ask(g, tools=[READ], enable_thinking=False, tool_choice="none")
        free, bound = g.engines.calls
        assert free.prompt == bound.prompt
        assert free.sampling.logit_bias == {}
        assert bound.sampling.logit_bias == {encode("<tool_call>")[0]: -100.0}


async def test_hints_reach_the_engine() -> None:
    async with gateway(saying("Hello!")) as g:
        system = {"role": "system", "content": "Be brief."}
        await ask(g, messages=[system, {"role": "user", "content": "Hi"}])
        (call,) = g.engines.calls
        hints = call.stream.request.hints
        prefix = encode("<|im_start|>system\nBe brief.<|im_end|>\n")
        assert call.prompt[: hints[0]] == prefix
        assert call.prompt[hints[-1] :] == encode("<think>\n")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"description": "d"}}]}, "tools[0].function.name"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
    ],
)
async def test_what_cannot_be_used_is_a_400_that_names_it(fields: dict, param: str) -> None:
    async with gateway(saying("")) as g:
        response = await g.chat(None, model="samovar-tiny", **fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


async def test_a_template_that_refuses_is_a_400_with_its_words() -> None:
    engines = tiny_engines()
    engines.text_side = replace(
        engines.text_side, chat_template="{{ raise_exception('No user query found in messages.') }}"
    )
    async with gateway(engines) as g:
        response = await g.chat(model="samovar-tiny")
        assert response.status_code == 400
        assert "No user query found in messages." in response.json()["error"]["message"]


async def test_the_openai_sdk_reads_thoughts_and_calls() -> None:
    async with (
        gateway(saying(f"Hm.\n</think>\n\n{CALL}")) as g,
        openai.AsyncOpenAI(base_url=f"{g.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(
            model="samovar-tiny",
            messages=[{"role": "user", "content": "Read a.py"}],
            tools=cast(Any, [READ]),
            stream=True,
        )
        deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
        thoughts = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
        (call,) = [call for delta in deltas for call in delta.tool_calls or []]
        assert thoughts == "Hm."
        assert call.function is not None
        assert json.loads(call.function.arguments or "") == {"path": "a.py", "lines": 3}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 200}, "max_tokens": 1000}),
        ("/v1/chat/completions", {"thinking": {"type": "enabled", "budget_tokens": 200}}),
        ("/v1/chat/completions", {"reasoning": {"max_tokens": 200}}),
        ("/v1/chat/completions", {"thinking_budget": 200}),
        ("/v1/chat/completions", {"thinking_token_budget": 200}),
        ("/v1/responses", {"reasoning": {"effort": "high", "max_tokens": 200}}),
    ],
)
async def test_a_thinking_budget_reaches_the_engine(path: str, fields: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"input" if path == "/v1/responses" else "messages": messages, **fields}
    async with gateway(saying("Hm.\n</think>\n\nHello!")) as g:
        assert (await g.http.post(path, json=body)).status_code == 200
        limit = g.engines.calls[0].sampling.thoughts
        assert limit is not None
        assert limit.close == encode("</think>")[0]
        text = decode(list(limit.closing))
        assert text.endswith("\n</think>\n\n")
        # What closes the thoughts is a part of the budget.
        assert limit.tokens + len(encode(text.removesuffix("\n\n"))) == 200


async def test_a_budget_of_thoughts_that_cannot_be_is_none() -> None:
    async with gateway(saying("Hello!")) as g:
        for fields in (
            {"enable_thinking": False, "thinking_budget": 200},
            {"thinking": {"type": "disabled", "budget_tokens": 200}},
            {"thinking_budget": 0},
            {"thinking_budget": -1},
        ):
            await ask(g, **fields)
        await ask(g, thinking_budget=3)
        *others, small = [call.sampling.thoughts for call in g.engines.calls]
        assert others == [None] * 4
        assert small is not None
        assert small.tokens == 1
