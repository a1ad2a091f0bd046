"""What a user of the Anthropic SDK sees, with a scripted engine and all real processes."""

from typing import Any

import anthropic

from tests.e2e.stack import Stack

READ: Any = {
    "name": "read",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}


def test_a_tool_call_streams_and_its_cost_is_the_count(scripted: Stack) -> None:
    asked: Any = {
        "model": "claude-sonnet-5",
        "messages": [{"role": "user", "content": "Please read notes.txt"}],
        "system": [{"type": "text", "text": "You are an agent. " * 20, "cache_control": {"type": "ephemeral"}}],
        "tools": [READ],
    }
    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0, timeout=60) as client:
        counted = client.messages.count_tokens(**asked).input_tokens
        messages = []
        for _ in range(2):
            with client.messages.stream(**asked, max_tokens=500) as stream:
                messages.append(stream.get_final_message())
        messages.append(client.messages.create(**asked, max_tokens=500))
        for message in messages:
            text, call = message.content
            assert isinstance(text, anthropic.types.TextBlock)
            assert isinstance(call, anthropic.types.ToolUseBlock)
            assert text.text == "Let me see."
            assert (call.name, call.input) == ("read", {"path": "notes.txt"})
            assert message.stop_reason == "tool_use"
            usage = message.usage
            assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
        starts = [
            e.message.usage
            for e in client.messages.create(**asked, max_tokens=500, stream=True)
            if e.type == "message_start"
        ]
        assert [(u.input_tokens, u.cache_read_input_tokens) for u in starts] == [
            (messages[1].usage.input_tokens, messages[1].usage.cache_read_input_tokens)
        ]
        assert messages[1].usage.cache_read_input_tokens
