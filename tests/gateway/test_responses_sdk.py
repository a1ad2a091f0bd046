"""The openai SDK's Responses API against the gateway: create, stream, chains, tools, and what was stored."""

from pathlib import Path

import openai
import pytest

from tests.gateway.http_gateway import gateway
from tests.gateway.responses_rig import (
    PATCH,
    PATCH_CALL,
    PATCH_TEXT,
    READ,
    READ_CALL,
    TINY,
    client,
    prompt_of,
    saying,
)

PLAIN = {"effort": "none"}


async def test_create_retrieve_and_delete() -> None:
    async with gateway(saying("Hm.\n</think>\n\nHello!")) as g, client(g) as sdk:
        made = await sdk.responses.create(model=TINY, input="Hi", metadata={"for": "test"})
        assert made.output_text == "Hello!"
        assert [item.type for item in made.output] == ["reasoning", "message"]
        assert made.usage is not None
        assert made.usage.input_tokens == len(g.engines.calls[0].prompt)
        assert made.usage.input_tokens_details.cached_tokens == 7
        found = await sdk.responses.retrieve(made.id)
        assert found.to_dict() == made.to_dict()
        await sdk.responses.delete(made.id)
        for gone in (sdk.responses.retrieve(made.id), sdk.responses.delete(made.id)):
            with pytest.raises(openai.NotFoundError) as error:
                await gone
            assert error.value.code == "response_not_found"


async def test_the_stream_helper() -> None:
    async with gateway(saying(f"Hm.\n</think>\n\nI read.\n\n{READ_CALL}\n{PATCH_CALL}")) as g, client(g) as sdk:
        seen = []
        async with sdk.responses.stream(model=TINY, input="Hi", tools=[READ, PATCH]) as stream:
            async for event in stream:
                seen.append(event)
            final = await stream.get_final_response()
        texts = [event for event in seen if event.type == "response.output_text.delta"]
        assert texts[-1].snapshot == "I read."
        thoughts = [event.delta for event in seen if event.type == "response.reasoning_text.delta"]
        assert "".join(thoughts) == "Hm."
        assert final.output_text == "I read."
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "custom_tool_call"]
        assert final.output[3].input == PATCH_TEXT
        assert final.to_dict()["usage"]["output_tokens"] > 0
        assert (await sdk.responses.retrieve(final.id)).output_text == "I read."


async def test_a_chain_is_the_conversation_written_out() -> None:
    answers = ("One.", "Two.", "Three.", "Three.")
    async with gateway(saying(*answers)) as g, client(g) as sdk:
        first = await sdk.responses.create(model=TINY, input="1", instructions="Count.", reasoning=PLAIN)
        second = await sdk.responses.create(
            model=TINY, input=[{"role": "user", "content": "2"}], previous_response_id=first.id, reasoning=PLAIN
        )
        third = await sdk.responses.create(
            model=TINY, input="3", instructions="Go on.", previous_response_id=second.id, reasoning=PLAIN
        )
        history = []
        for question, answer in (("1", first), ("2", second)):
            history += [{"role": "user", "content": question}, *answer.to_dict()["output"]]
        await sdk.responses.create(
            model=TINY, instructions="Go on.", input=[*history, {"role": "user", "content": "3"}], reasoning=PLAIN
        )
        assert g.engines.calls[2].prompt == g.engines.calls[3].prompt
        assert "Count." in prompt_of(g.engines.calls[0])
        assert "Count." not in prompt_of(g.engines.calls[2]), "instructions are those of the request"
        assert third.previous_response_id == second.id
        listed = [item async for item in sdk.responses.input_items.list(third.id, order="asc", limit=2)]
        assert len(listed) == 5, "pages are put together by the SDK"
        assert [item.content[0].text for item in listed] == ["1", "One.", "2", "Two.", "3"]
        newest = await sdk.responses.input_items.list(third.id, limit=1)
        assert [newest.data[0].content[0].text, newest.has_more] == ["3", True]
        assert newest.first_id == newest.last_id == newest.data[0].id
        with pytest.raises(openai.BadRequestError):
            await sdk.responses.input_items.list(third.id, after="nothing")


async def test_a_tool_round_trip() -> None:
    async with gateway(saying(f"{READ_CALL}\n{PATCH_CALL}", "Done.")) as g, client(g) as sdk:
        asked = await sdk.responses.create(model=TINY, input="Read a.py", tools=[READ, PATCH], reasoning=PLAIN)
        read, patch = asked.output
        results = [
            {"type": "function_call_output", "call_id": read.call_id, "output": "RESULT-1"},
            {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "RESULT-2"},
        ]
        by_id = await sdk.responses.create(
            model=TINY, input=results, tools=[READ, PATCH], previous_response_id=asked.id, reasoning=PLAIN
        )
        sent = [item.to_dict() for item in asked.output]
        whole = [{"role": "user", "content": "Read a.py"}, *sent, *results]
        by_hand = await sdk.responses.create(model=TINY, input=whole, tools=[READ, PATCH], reasoning=PLAIN)
        assert by_id.output_text == by_hand.output_text == "Done."
        assert g.engines.calls[1].prompt == g.engines.calls[2].prompt
        prompt = prompt_of(g.engines.calls[1])
        assert prompt.index(PATCH_TEXT) < prompt.index("RESULT-1") < prompt.index("RESULT-2")


async def test_input_tokens_are_those_of_the_later_request() -> None:
    async with gateway(saying("Hello!")) as g, client(g) as sdk:
        first = await sdk.responses.create(model=TINY, input="Hi")
        fields = {
            "model": TINY,
            "input": "And now?",
            "instructions": "Be kind.",
            "tools": [READ, PATCH],
            "previous_response_id": first.id,
            "reasoning": {"effort": "low"},
        }
        counted = await sdk.responses.input_tokens.count(**fields)
        later = await sdk.responses.create(**fields)
        assert later.usage is not None
        assert counted.input_tokens == later.usage.input_tokens == len(g.engines.calls[1].prompt)
        assert (await sdk.responses.input_tokens.count(model=TINY, input="word " * 9000)).input_tokens > 9000


async def test_an_unknown_previous_response() -> None:
    async with gateway(saying("Hello!")) as g, client(g) as sdk:
        for stream in (False, True):
            with pytest.raises(openai.NotFoundError) as error:
                await sdk.responses.create(model=TINY, input="Hi", previous_response_id="resp_x", stream=stream)
            assert (error.value.code, error.value.param) == ("previous_response_not_found", "previous_response_id")
        first = await sdk.responses.create(model=TINY, input="Hi")
        second = await sdk.responses.create(model=TINY, input="Hi", previous_response_id=first.id)
        await sdk.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="earlier one"):
            await sdk.responses.create(model=TINY, input="Hi", previous_response_id=second.id)
        unstored = await sdk.responses.create(model=TINY, input="Hi", store=False)
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.retrieve(unstored.id)


async def test_a_failed_stream_raises_nothing_and_tells_its_error() -> None:
    async with gateway(saying("Half", finish="error")) as g, client(g) as sdk:
        events = [event async for event in await sdk.responses.create(model=TINY, input="Hi", stream=True)]
        assert events[-1].type == "response.failed"
        assert events[-1].response.error.code == "engine_error"


async def test_chains_outlive_the_gateway(tmp_path: Path) -> None:
    database = str(tmp_path / "s.db")
    async with gateway(saying("One.", "Two."), database) as g, client(g) as sdk:
        first = await sdk.responses.create(model=TINY, input="1", reasoning=PLAIN)
        second = await sdk.responses.create(model=TINY, input="2", previous_response_id=first.id, reasoning=PLAIN)
    async with gateway(saying("Three."), database) as g, client(g) as sdk:
        third = await sdk.responses.create(model=TINY, input="3", previous_response_id=second.id, reasoning=PLAIN)
        assert third.output_text == "Three."
        prompt = prompt_of(g.engines.calls[0])
        assert prompt.index("One.") < prompt.index("Two.")
        assert (await sdk.responses.retrieve(first.id)).to_dict() == first.to_dict()
