"""The bytes of events: one line each, valid JSON, whatever the text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.errors import invalid
from services.gateway.openai.chat_response import ChatResponse
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
    chunk = event(RESPONSE.content(text))
    assert chunk["choices"] == [{"index": 0, "delta": {"content": text}, "finish_reason": None}]
    assert chunk["model"] == 'odd "name"\n'


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_every_event_has_the_same_head_and_choices(reason: FinishReason) -> None:
    usage = Usage(prompt_tokens=5, output_tokens=2, cached_device=1, cached_host=3)
    chunks = [
        event(data) for data in (RESPONSE.role, RESPONSE.keepalive, RESPONSE.finish(reason), RESPONSE.usage(usage))
    ]
    assert {(c["id"], c["object"], c["created"]) for c in chunks} == {
        ("chatcmpl-id", "chat.completion.chunk", 1_700_000_000)
    }
    role, keepalive, finish, last = (c["choices"] for c in chunks)
    assert role[0]["delta"] == {"role": "assistant", "content": ""}
    assert keepalive == last == []
    assert finish == [{"index": 0, "delta": {}, "finish_reason": reason}]
    assert chunks[3]["usage"]["total_tokens"] == 7
    assert chunks[3]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_an_error_event_is_openais_error_object() -> None:
    error = event(RESPONSE.error(invalid("No\nway", "messages")))["error"]
    assert error == {"message": "No\nway", "type": "invalid_request_error", "param": "messages", "code": None}
