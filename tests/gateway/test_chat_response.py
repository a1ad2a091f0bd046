"""The bytes of events: one line each, valid JSON, whatever the text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.errors import invalid
from services.gateway.openai.chat_response import DONE, ChatResponse, chat_finish
from services.gateway.output.pieces import CallDelta, Content, Reasoning
from services.gateway.renderer import Cost, Ending
from services.protocol.generate import FinishReason, Usage

RESPONSE = ChatResponse("id", 'odd "name"\n', 1_700_000_000, include_usage=True)


def event(data: bytes) -> dict:
    assert data.startswith(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    return json.loads(data[6:])


@settings(deadline=None)
@given(st.text())
def test_any_text_is_one_line_of_json(text: str) -> None:
    chunk = event(RESPONSE.pieces([Content(text)]))
    assert chunk["choices"] == [{"index": 0, "delta": {"content": text}, "finish_reason": None}]
    assert chunk["model"] == 'odd "name"\n'


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_every_event_has_the_same_head_and_choices(reason: FinishReason) -> None:
    usage = Usage(prompt_tokens=5, output_tokens=2, cached_device=1, cached_host=3)
    last = RESPONSE.closing(Cost(usage, 0))
    assert last.endswith(DONE)
    parts = (RESPONSE.lead(None), RESPONSE.keepalive(), RESPONSE.finish(Ending(reason)), last.removesuffix(DONE))
    chunks = [event(data) for data in parts]
    assert {(c["id"], c["object"], c["created"]) for c in chunks} == {
        ("chatcmpl-id", "chat.completion.chunk", 1_700_000_000)
    }
    role, keepalive, finish, closing = (c["choices"] for c in chunks)
    assert role[0]["delta"] == {"role": "assistant", "content": ""}
    assert keepalive == closing == []
    assert finish == [{"index": 0, "delta": {}, "finish_reason": reason}]
    assert chunks[3]["usage"]["total_tokens"] == 7
    assert chunks[3]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_an_error_event_is_openais_error_object() -> None:
    error = event(RESPONSE.error(invalid("No\nway", "messages")))["error"]
    assert error == {"message": "No\nway", "type": "invalid_request_error", "param": "messages", "code": None}


def test_thoughts_go_by_both_names_with_equal_text() -> None:
    (choice,) = event(RESPONSE.pieces([Reasoning("Hm\n")]))["choices"]
    assert choice["delta"] == {"reasoning_content": "Hm\n", "reasoning": "Hm\n"}


def test_a_call_names_itself_once() -> None:
    deltas = [CallDelta(0, '{"a"', "id-0", "f"), CallDelta(0, ": 1}"), CallDelta(1, "{}", "id-1", "g")]
    chunks = [event(RESPONSE.pieces([delta]))["choices"][0]["delta"] for delta in deltas]
    assert chunks == [
        {
            "tool_calls": [
                {"index": 0, "id": "id-0", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {"tool_calls": [{"index": 1, "id": "id-1", "type": "function", "function": {"name": "g", "arguments": "{}"}}]},
    ]
    usage = Usage(prompt_tokens=1, output_tokens=9)
    whole = json.loads(
        RESPONSE.whole([Content("a"), Reasoning("r"), *deltas, Content("b")], Ending("stop", 2), Cost(usage, 4))
    )
    assert whole["choices"][0]["message"] == {
        "role": "assistant",
        "content": "ab",
        "reasoning_content": "r",
        "reasoning": "r",
        "tool_calls": [
            {"id": "id-0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"id": "id-1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_an_answer_without_thoughts_or_calls_does_not_mention_them() -> None:
    whole = json.loads(RESPONSE.whole([], Ending("length"), Cost(Usage(prompt_tokens=1, output_tokens=0), 0)))
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": ""}


def test_only_an_answer_that_the_model_ended_waits_for_its_calls() -> None:
    ends: list[tuple[FinishReason, int]] = [("stop", 0), ("stop", 1), ("length", 1)]
    assert [chat_finish(Ending(reason, calls)) for reason, calls in ends] == [
        "stop",
        "tool_calls",
        "length",
    ]
