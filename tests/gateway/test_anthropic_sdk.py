"""The anthropic SDK against the gateway's HTTP side, its streaming helper included."""

from typing import Any, cast

import anthropic
import pytest
from anthropic import beta_async_tool

from services.gateway.engine_errors import EngineRejected
from tests.gateway.fake_engines import MODEL, FakeEngines
from tests.gateway.http_gateway import Gateway, gateway
from tests.gateway.test_messages_http import CALL, READ, saying

HI: Any = [{"role": "user", "content": "Hi"}]
TOOLS = cast(Any, [READ])


def client(g: Gateway, key: str = "any") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=g.url, api_key=key, max_retries=0, timeout=10)


async def test_a_turn_with_thoughts_and_a_call_streamed_and_whole() -> None:
    engines = saying(f"Hm.\n</think>\n\nLet me see.\n\n{CALL}", cached_device=4)
    async with gateway(engines) as g, client(g) as sdk:
        asked: Any = {
            "model": "claude-sonnet-4-5",
            "max_tokens": 2000,
            "messages": HI,
            "tools": TOOLS,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        text = ""
        async with sdk.messages.stream(**asked) as stream:
            async for event in stream:
                if event.type == "text":
                    text += event.text
            streamed = await stream.get_final_message()
        whole = await sdk.messages.create(**asked)
        assert text == "Let me see."
        for message in (streamed, whole):
            thoughts, answer, call = message.content
            assert isinstance(thoughts, anthropic.types.ThinkingBlock)
            assert (thoughts.thinking, bool(thoughts.signature)) == ("Hm.", True)
            assert isinstance(answer, anthropic.types.TextBlock)
            assert answer.text == "Let me see."
            assert isinstance(call, anthropic.types.ToolUseBlock)
            assert (call.name, call.input) == ("read", {"path": "a.py", "lines": 3})
            assert message.stop_reason == "tool_use"
            usage = message.usage
            prompt = len(g.engines.calls[0].prompt)
            assert (usage.input_tokens, usage.cache_read_input_tokens) == (prompt - 4, 4)
        counted = await sdk.messages.count_tokens(
            model=asked["model"], messages=HI, tools=TOOLS, thinking=asked["thinking"]
        )
        assert counted.input_tokens == prompt
        # The tool's result goes back behind the message as it came, signature and all.
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "x = 1"}
        asked["messages"] = [
            *HI,
            {"role": "assistant", "content": [block.model_dump() for block in whole.content]},
            {"role": "user", "content": [result]},
        ]
        again = await sdk.messages.create(**asked)
        assert again.stop_reason == "tool_use"


async def test_models_are_listed_with_an_alias() -> None:
    async with gateway(FakeEngines()) as g, client(g) as sdk:
        listed = [model async for model in sdk.models.list(limit=1000)]
        assert [(model.id, model.display_name) for model in listed] == [(MODEL, MODEL), (f"claude-{MODEL}", MODEL)]
        assert (await sdk.models.retrieve(f"claude-{MODEL}")).type == "model"


async def test_errors_have_their_types() -> None:
    async with gateway(FakeEngines().says("x"), api_keys=("key",)) as g:
        async with client(g, "wrong") as sdk:
            with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
                await sdk.messages.create(model=MODEL, max_tokens=9, messages=HI)
            with pytest.raises(anthropic.AuthenticationError):
                await sdk.models.list()
        async with anthropic.AsyncAnthropic(base_url=g.url, auth_token="key", max_retries=0) as sdk:
            assert (await sdk.messages.create(model=MODEL, max_tokens=9, messages=HI)).content
            with pytest.raises(anthropic.NotFoundError):
                await sdk.messages.create(model="nope", max_tokens=9, messages=HI)
            with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
                await sdk.messages.create(
                    model=MODEL, max_tokens=9, messages=HI, tools=TOOLS, tool_choice={"type": "any"}
                )
            g.engines.refusal = EngineRejected("overloaded", "The queue is full.", 1.0)
            for stream in (True, False):
                with pytest.raises(anthropic.APIStatusError, match="overloaded_error") as full:
                    await sdk.messages.create(model=MODEL, max_tokens=9, messages=HI, stream=stream)
                assert full.value.status_code == 529


async def test_an_error_in_a_stream_is_raised() -> None:
    engines = FakeEngines()

    def fail(call: Any) -> None:
        call.say("Half")
        call.finish("error", "The device is gone.")

    engines.on_call = fail
    async with gateway(engines) as g, client(g) as sdk:
        with pytest.raises(anthropic.APIError, match="The device is gone"):
            async with sdk.messages.stream(model=MODEL, max_tokens=9, messages=HI) as stream:
                await stream.get_final_message()


async def test_a_stop_sequence_is_named() -> None:
    async with gateway(FakeEngines().says("One two three")) as g, client(g) as sdk:
        async with sdk.messages.stream(model=MODEL, max_tokens=9, messages=HI, stop_sequences=[" three"]) as stream:
            message = await stream.get_final_message()
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " three")
        assert isinstance(message.content[0], anthropic.types.TextBlock)
        assert message.content[0].text == "One two"


async def test_a_call_that_the_limit_cuts_is_run_by_no_helper() -> None:
    """As in Anthropic's own streams the block is there, as far as it came; `max_tokens` says that it is no call."""
    ran: list[str] = []

    @beta_async_tool
    async def read(path: str) -> str:
        """Reads a file."""
        ran.append(path)
        return "x = 1"

    cut = "Let me see.\n\n<tool_call>\n<function=read>\n<parameter=path>\na.py and mo"
    async with gateway(saying(cut, "length")) as g, client(g) as sdk:
        asked: Any = {"model": "claude-opus-5", "max_tokens": 2000, "messages": HI}
        whole = await sdk.messages.create(**asked, tools=TOOLS)
        assert ([block.type for block in whole.content], whole.stop_reason) == (["text"], "max_tokens")
        for api in (sdk.messages, sdk.beta.messages):
            async with api.stream(**asked, tools=TOOLS) as stream:
                message = await stream.get_final_message()
            assert ([block.type for block in message.content], message.stop_reason) == (
                ["text", "tool_use"],
                "max_tokens",
            )
            call = cast(Any, message.content[1])
            assert (call.name, call.input) == ("read", {})
        for stream in (True, False):
            final = await sdk.beta.messages.tool_runner(**asked, tools=[read], stream=stream).until_done()
            assert final.stop_reason == "max_tokens"
        assert ran == []
        # The client's next turn: what it has of the answer goes back, with a result or without.
        back = [block.model_dump() for block in message.content]
        for turns in (
            [{"role": "user", "content": "Go on."}],
            [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "cut"}]}],
        ):
            asked["messages"] = [*HI, {"role": "assistant", "content": back}, *turns]
            assert (await sdk.messages.create(**asked, tools=TOOLS)).stop_reason == "max_tokens"
