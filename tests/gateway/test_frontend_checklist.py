"""What agent frontends need, line by line: HELD_BY names the tests that hold each line, the missing ones are here."""

import ast
import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.config import GatewayConfig
from tests.gateway.http_gateway import events, gateway
from tests.gateway.test_family_http import CALL, READ, both, saying
from tests.gateway.tiny import decode

TESTS = Path(__file__).parents[1]

HELD_BY: dict[str, tuple[str, ...]] = {
    "1 status and headers before the queue, refusals before the headers": (
        "gateway/test_chat_http.py::test_headers_come_before_the_first_token_and_keepalives_until_then",
        "gateway/test_chat_http.py::test_a_bad_request_is_decided_before_the_headers_of_a_stream",
    ),
    "2 keep-alives that are events, the first after 5 s at most": (
        "gateway/test_frontend_checklist.py::test_keepalives_that_every_client_sees",
        "gateway/test_messages_http.py::test_pings_come_at_once_and_message_start_with_the_first_token",
        "gateway/test_responses_http.py::test_keepalives_are_events",
    ),
    "3 the form of a chat's events": (
        "gateway/test_frontend_checklist.py::test_the_form_of_a_chats_events",
        "gateway/test_chat_response.py::test_any_text_is_one_line_of_json",
    ),
    "4 one finish reason, then the usage": (
        "gateway/test_frontend_checklist.py::test_the_form_of_a_chats_events",
        "gateway/test_chat_http.py::test_usage_comes_after_the_finish_where_it_was_asked_for",
    ),
    "5 usage adds up in every API": ("e2e/test_cases.py::test_usage_of_a_repeated_prompt_in_every_family",),
    "6 thoughts by both names or none": (
        "gateway/test_chat_response.py::test_thoughts_go_by_both_names_with_equal_text",
        "gateway/test_chat_response.py::test_an_answer_without_thoughts_or_calls_does_not_mention_them",
    ),
    "7 deltas of tool calls": (
        "e2e/test_cases.py::test_two_calls_in_one_delta",
        "e2e/test_cases.py::test_calls_at_every_cut",
        "gateway/test_frontend_checklist.py::test_a_call_without_arguments_is_an_empty_object",
    ),
    "8 one history in all its spellings": (
        "gateway/test_frontend_checklist.py::test_a_history_is_the_same_prompt_in_every_api",
        "gateway/test_family_prompt.py::test_thoughts_of_old_turns_render_alike_under_every_name",
        "gateway/test_family_prompt.py::test_empty_content_beside_calls_renders_alike",
    ),
    "9 arguments in another form do not lose the cache": (
        "gateway/test_frontend_checklist.py::test_arguments_in_another_form_keep_the_prompt_up_to_their_turn",
        "gateway/test_family_prompt.py::test_arguments_of_the_history",
    ),
    "10 all spellings of the thinking switch": (
        "gateway/test_thinking.py::test_off",
        "gateway/test_thinking.py::test_on",
        "gateway/test_thinking.py::test_a_template_gets_the_nearest_effort",
    ),
    "11 small chats at once, those that do not think first": (
        "e2e/test_frontends.py::test_short_answers_overtake_long_ones",
        "gateway/test_chat_http.py::test_a_hundred_requests_at_once",
    ),
    "12 what is unknown is ignored, wrong types are named": (
        "gateway/test_chat_request.py::test_unknown_fields_and_nulls_are_ignored",
        "gateway/test_chat_request.py::test_a_bad_field_is_a_400_that_names_it",
        "gateway/test_frontend_checklist.py::test_what_is_unknown_is_ignored_in_every_api",
        "gateway/test_openapi.py::test_every_answer_is_as_described",
    ),
    "13 odd conversations": ("gateway/test_frontend_checklist.py::test_odd_conversations_are_answered",),
    "14 late system messages in place": (
        "gateway/test_frontend_checklist.py::test_a_late_system_message_changes_nothing_before_it",
        "gateway/test_family_prompt.py::test_late_system_messages_stay_in_place_as_reminders",
    ),
    "15 the billing block": ("gateway/test_messages_http.py::test_the_billing_block_reaches_neither_model_nor_cache",),
    "16 overflow in the words that agents know, cheap when repeated": (
        "e2e/test_cases.py::test_an_overflow_tells_its_numbers_before_any_header",
        "gateway/test_prompt.py::test_a_repeated_overflow_is_not_tokenized_again",
    ),
    "17 limits are clamped, defaults are the model's": (
        "gateway/test_chat_request.py::test_the_limit_is_clamped_never_refused",
        "gateway/test_chat_request.py::test_the_models_defaults_stand_behind_the_clients_fields",
    ),
    "18 discovery": (
        "gateway/test_chat_http.py::test_models",
        "gateway/test_completions_http.py::test_discovery_by_other_servers_manners",
    ),
    "19 counts are exact": (
        "e2e/test_anthropic.py::test_a_tool_call_streams_and_its_cost_is_the_count",
        "gateway/test_responses_sdk.py::test_input_tokens_are_those_of_the_later_request",
    ),
    "20 a client that leaves, and one that asks again": (
        "gateway/test_disconnect.py::test_in_the_queue_or_in_prefill",
        "gateway/test_disconnect.py::test_in_decode",
        "e2e/test_faults.py::test_a_client_that_goes_away_frees_its_place",
        "gateway/test_resends.py::test_the_newcomer_takes_the_answer_over",
    ),
    "21 an aborted turn is found again": ("e2e/test_frontends.py::test_an_aborted_turn_is_found_in_the_cache",),
    "22 marks of sessions and their order": (
        "gateway/test_completions_http.py::test_marks_of_clients_name_sessions",
        "gateway/test_sessions_store.py::test_the_clients_names_count_in_order",
    ),
    "23 a parent's prefix outlives its sub-agents": (
        "e2e/test_cache.py::test_conversations_beyond_the_device_pool_come_back_also_behind_a_restart",
    ),
    "24 overload is a 503, never a 429": (
        "gateway/test_chat_http.py::test_refusals_of_the_engine_come_before_the_headers",
        "gateway/test_messages_http.py::test_errors_have_anthropics_envelope_and_statuses",
        "gateway/test_responses_http.py::test_overload_is_a_503_also_for_a_stream",
    ),
    "25 images are refused clearly": (
        "gateway/test_frontend_checklist.py::test_an_image_is_refused_in_every_turn_of_every_api",
    ),
    "26 errors behind the headers": (
        "gateway/test_chat_http.py::test_an_engine_error_in_a_stream_ends_it_without_a_fake_finish",
        "gateway/test_messages_http.py::test_an_error_in_a_stream_is_its_last_event",
        "gateway/test_responses_http.py::test_an_engine_that_fails_ends_the_stream_with_failed",
    ),
    "27 items of responses": (
        "gateway/test_responses_http.py::test_events_and_their_order",
        "gateway/test_responses_http.py::test_codex",
    ),
    "28 whole answers are the streamed ones": (
        "e2e/test_cases.py::test_calls_at_every_cut",
        "e2e/test_openai.py::test_stream_and_answer_are_the_same_text",
        "gateway/test_responses_http.py::test_whole_and_streamed_are_the_same",
    ),
}
"""Line 29, the metrics by vLLM's names, belongs to the dashboards."""

USER = {"role": "user", "content": "Hi"}
FUNCTION = READ["function"]
TOOLS = {
    "/v1/chat/completions": [READ],
    "/v1/messages": [{"name": "read", "input_schema": FUNCTION["parameters"]}],
    "/v1/responses": [{"type": "function", **FUNCTION}],
}
CHAT, MESSAGES, RESPONSES = TOOLS


@pytest.mark.parametrize("line", HELD_BY)
def test_each_line_is_held(line: str) -> None:
    for name in HELD_BY[line]:
        path, _, test = name.partition("::")
        found = [node for node in ast.parse((TESTS / path).read_text()).body if getattr(node, "name", "") == test]
        assert found, name


def body(path: str, *turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    limit = {"max_tokens": 100} if path == MESSAGES else {}
    return limit | {"input" if path == RESPONSES else "messages": list(turns), **fields}


async def test_keepalives_that_every_client_sees() -> None:
    assert GatewayConfig().keepalive <= 5
    async with gateway(keepalive=0.05) as g:
        for path in TOOLS:
            async with g.http.stream("POST", path, json=body(path, USER, stream=True)) as response:
                assert response.status_code == 200
                await g.engines.called()
                lines = (line async for line in response.aiter_lines() if line.startswith("data: "))
                seen = [json.loads((await asyncio.wait_for(anext(lines), 5))[6:]) for _ in range(4)]
            if path == CHAT:
                assert all((e["choices"], e["object"]) == ([], "chat.completion.chunk") for e in seen)
            else:
                kind = "ping" if path == MESSAGES else "response.in_progress"
                assert [e["type"] for e in seen[1:]] == [kind] * 3


async def test_the_form_of_a_chats_events() -> None:
    async with gateway(saying(f"Hm.\n</think>\n\nLet me see.\n\n{CALL}")) as g:
        response = await g.chat(model="samovar-tiny", tools=[READ], stream=True, stream_options={"include_usage": True})
        chunks = events(response.text)  # one line of JSON each, and [DONE] last
        assert len({(c["id"], c["model"], c["created"]) for c in chunks}) == 1
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert all(isinstance(choice["delta"], dict) for choice in choices)
        assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
        finishes = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        assert (finishes, choices[-1]["finish_reason"]) == (["tool_calls"], "tool_calls")
        assert chunks[-1]["choices"] == []
        assert [chunk for chunk in chunks if "usage" in chunk] == [chunks[-1]]


async def test_a_call_without_arguments_is_an_empty_object() -> None:
    empty = "<tool_call>\n<function=read>\n</function>\n</tool_call>"
    async with gateway(saying(f"\n</think>\n\n{empty}")) as g:
        message, finish, _ = await both(g, tools=[READ])
        assert (message["tool_calls"][0]["function"], finish) == ({"name": "read", "arguments": "{}"}, "tool_calls")


async def prompts(requests: list[tuple[str, dict[str, Any]]], **fields: Any) -> list[str]:
    """What the engine is given, of requests that must all be answered."""
    async with gateway(saying("Fine.")) as g:
        for path, asked in requests:
            response = await g.http.post(path, json={**asked, **fields})
            assert response.status_code == 200, response.text
        return [decode(call.prompt) for call in g.engines.calls]


async def test_a_history_is_the_same_prompt_in_every_api() -> None:
    arguments = {"path": "a.py", "lines": 3}
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": json.dumps(arguments)}}
    result = {"role": "tool", "tool_call_id": "c", "content": "x = 1"}
    parts = [{"type": "text", "text": "Hi"}]
    asked: list[tuple[str, dict[str, Any]]] = []
    for name in ("reasoning", "reasoning_content", "thinking"):
        for content in (" ", "", None):
            turn = {"role": "assistant", "content": content, name: "Hm.", "tool_calls": [call]}
            first = USER if content else {"role": "user", "content": parts}
            asked.append((CHAT, body(CHAT, first, turn, result, tools=TOOLS[CHAT], enable_thinking=True)))
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "tool_use", "id": "c", "name": "read", "input": arguments},
    ]
    answers = [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x = 1"}]}]
    turns = (USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": answers})
    asked.append((MESSAGES, body(MESSAGES, *turns, tools=TOOLS[MESSAGES], thinking={"type": "adaptive"})))
    items = (
        USER,
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c", "name": "read", "arguments": json.dumps(arguments)},
        {"type": "function_call_output", "call_id": "c", "output": "x = 1"},
    )
    asked.append((RESPONSES, body(RESPONSES, *items, tools=TOOLS[RESPONSES], reasoning={"effort": "high"})))
    given = await prompts(asked)
    assert len(given) == 11
    assert len(set(given)) == 1
    assert "Hm." in given[0]


async def test_arguments_in_another_form_keep_the_prompt_up_to_their_turn() -> None:
    def asked(arguments: str, text: str = "Let me see.") -> dict[str, Any]:
        call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": arguments}}
        turn = {"role": "assistant", "content": text, "tool_calls": [call]}
        return body(CHAT, USER, turn, {"role": "tool", "tool_call_id": "c", "content": "x"}, tools=[READ])

    as_made, spaced, turned = await prompts(
        [
            (CHAT, asked('{"path":"a.py","lines":3}')),
            (CHAT, asked('{ "path" : "a.py",\n "lines": 3 }')),
            (CHAT, asked('{"lines": 3, "path": "a.py"}')),
        ]
    )
    assert as_made == spaced
    before = as_made.index("<function=read>")
    assert turned[:before] == as_made[:before]


async def test_what_is_unknown_is_ignored_in_every_api() -> None:
    extra = {"x_new": {"deep": [1]}, "context_management": {"edits": []}, "client_metadata": {"a": 1}, "top_z": 1}
    turn = {**USER, "cache_control": {"type": "ephemeral"}, "x": 1}
    asked = []
    for path, tools in TOOLS.items():
        odd = [{**tools[0], "strict": True, "defer_loading": True}, {"type": "web_search_20250305", "name": "web"}]
        asked.append((path, body(path, turn, tools=odd, **extra)))
    async with gateway(saying("Fine.")) as g:
        for path, given in asked:
            headers = {"anthropic-beta": "unheard-of-2030-01-01", "x-stainless-os": "Linux"}
            response = await g.http.post(path, json=given, headers=headers)
            assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", TOOLS)
async def test_odd_conversations_are_answered(path: str) -> None:
    fields = {"max_output_tokens" if path == RESPONSES else "max_tokens": 1}
    system = {"role": "system", "content": "Be brief."}
    said = {"role": "assistant", "content": "Half an ans"}
    orphan: dict[str, Any] = {"role": "tool", "tool_call_id": "gone", "content": "x = 1"}
    if path == MESSAGES:
        orphan = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "gone", "content": "x = 1"}]}
    if path == RESPONSES:
        orphan = {"type": "function_call_output", "call_id": "gone", "output": "x = 1"}
    turns = ([system], [USER, USER], [system, USER, said], [USER, orphan], [USER, said, orphan, USER])
    given = await prompts([(path, body(path, *odd, tools=TOOLS[path], **fields)) for odd in turns])
    assert len(given) == len(turns)


@pytest.mark.parametrize(
    ("path", "role"),
    [(CHAT, "system"), (CHAT, "developer"), (MESSAGES, "system"), (RESPONSES, "system"), (RESPONSES, "developer")],
)
async def test_a_late_system_message_changes_nothing_before_it(path: str, role: str) -> None:
    turns = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Hello!"}]
    late = {"role": role, "content": "Mind the time."}
    without, with_it = await prompts(
        [(path, body(path, *turns, USER)), (path, body(path, *turns, late, USER))], enable_thinking=False
    )
    place = with_it.index("Mind the time.")
    kept = with_it[: with_it.rindex("<|im_start|>", 0, place)]
    assert "Hello!" in kept
    assert without.startswith(kept)


async def test_an_image_is_refused_in_every_turn_of_every_api() -> None:
    data = "data:image/png;base64,iVBORw0KGgo="
    url = {"type": "image_url", "image_url": {"url": data}}
    source = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    shown = {"type": "input_image", "image_url": data}
    asked = [
        (CHAT, {"role": "user", "content": [url]}, "messages[0].content[0]"),
        (CHAT, {"role": "tool", "tool_call_id": "c", "content": [url]}, "messages[0].content[0]"),
        (MESSAGES, {"role": "user", "content": [source]}, "messages[0].content[0]"),
        (
            MESSAGES,
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [source]}]},
            "messages[0].content[0].content[0]",
        ),
        (RESPONSES, {"role": "user", "content": [shown]}, "input[0].content[0]"),
        (RESPONSES, {"type": "function_call_output", "call_id": "c", "output": [shown]}, "input[0].output[0]"),
    ]
    async with gateway(saying("")) as g:
        for path, turn, place in asked:
            response: httpx.Response = await g.http.post(path, json=body(path, turn))
            assert response.status_code == 400
            message = response.json()["error"]["message"]
            assert message.startswith(place)
            assert "reads text only" in message
        assert g.engines.calls == []
        failed = await g.http.post(RESPONSES, json=body(RESPONSES, asked[-1][1], stream=True))
        assert failed.status_code == 400
