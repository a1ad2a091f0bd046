"""Items, tools and custom inputs of the Responses API, without HTTP."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.errors import ApiError
from services.gateway.output.pieces import CallDelta, Content, Reasoning
from services.gateway.renderer import Cost, Ending
from services.gateway.responses import tools
from services.gateway.responses.custom_input import CustomInput
from services.gateway.responses.events import ResponsesRenderer
from services.gateway.responses.input_items import as_items, for_template
from services.gateway.responses.request import parse
from services.gateway.responses.response_object import ResponseObject
from services.protocol.generate import Usage
from tests.gateway.responses_rig import PATCH, READ, Events

COST = Cost(Usage(prompt_tokens=3, output_tokens=2), 1)


def call(id: str, name: str = "read", arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}


def renderer(custom: frozenset[str] = frozenset()) -> ResponsesRenderer:
    return ResponsesRenderer(ResponseObject.begun(parse(b'{"input":"Hi"}'), "resp_1", "m", 5), custom, None)


def roles(items: list[dict[str, Any]], instructions: str | None = None) -> list[str]:
    return [message["role"] for message in for_template(instructions, items)]


def test_leading_system_texts_are_one_and_later_ones_stay() -> None:
    items = [
        {"role": "developer", "content": "B"},
        {"role": "system", "content": [{"type": "input_text", "text": "C"}]},
        {"role": "user", "content": "Hi"},
        {"role": "developer", "content": "D"},
    ]
    messages = for_template("A", items)
    assert [(m["role"], m["content"]) for m in messages] == [
        ("system", "A\n\nB\n\nC"),
        ("user", "Hi"),
        ("system", "D"),
    ]
    assert roles(items[2:]) == ["user", "system"]
    assert for_template("A", []) == [{"role": "system", "content": "A"}]
    assert for_template("", []) == []


def test_one_turn_of_the_assistant_is_one_message() -> None:
    items = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "Look."},
        call("1", arguments='{"path": "a"}'),
        {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": "***"},
        {"role": "assistant", "content": " More."},
    ]
    (message,) = for_template(None, items)
    assert message == {
        "role": "assistant",
        "reasoning_content": "Hm.",
        "content": "Look. More.",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "read", "arguments": {"path": "a"}}},
            {"id": "2", "type": "function", "function": {"name": "apply_patch", "arguments": {"input": "***"}}},
        ],
    }


def test_turns_of_the_assistant_are_told_apart() -> None:
    thoughts = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    text = {"role": "assistant", "content": "Yes."}
    output = {"type": "function_call_output", "call_id": "1", "output": "x"}
    assert roles([text, text]) == ["assistant"] * 2
    assert roles([text, thoughts, text]) == ["assistant"] * 2
    assert roles([call("1"), thoughts, call("2")]) == ["assistant"] * 2
    assert roles([call("1"), output, call("2"), output]) == ["assistant", "tool"] * 2
    assert roles([{"type": "function_call_output", "output": "orphan"}]) == ["tool"]
    assert roles([text, {**call("1", arguments='{"path'), "status": "incomplete"}]) == ["assistant"]


def test_a_summary_stands_in_for_thoughts_and_unreadable_ones_are_none() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Short."}], "content": None}
    text = {"role": "assistant", "content": "Yes."}
    assert for_template(None, [summary, text])[0]["reasoning_content"] == "Short."
    assert for_template(None, [{"type": "reasoning", "encrypted_content": "x"}, text]) == [
        {"role": "assistant", "content": "Yes."}
    ]


def test_errors_name_the_item_of_the_request_not_of_its_history() -> None:
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
    with pytest.raises(ApiError) as error:
        for_template(None, [*history, image], first=2)
    assert error.value.param == "input[0].content[0]"
    output = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image"}]}
    with pytest.raises(ApiError) as error:
        for_template(None, [output])
    assert error.value.param == "input[0].output[0]"


def test_items_are_listed_with_types_ids_and_parts() -> None:
    assert as_items("Hi", "r") == [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}], "type": "message", "id": "item_r_0"}
    ]
    items = as_items([{"role": "assistant", "content": "Yes", "id": "mine"}, {**call("1"), "id": None}], "r")
    assert items[0] == {
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Yes"}],
        "id": "mine",
        "type": "message",
    }
    assert items[1]["id"] == "item_r_1"
    assert as_items("", "r") == as_items(None, "r") == []
    assert for_template(None, as_items("Hi", "r")) == for_template(None, [{"role": "user", "content": "Hi"}])


def test_tools() -> None:
    found = tools.for_template([READ, {"type": "web_search"}, PATCH, {"type": "namespace", "name": "n"}, {}])
    assert found[0] == {
        "type": "function",
        "function": {"name": "read", "description": "Reads a file.", "parameters": READ["parameters"]},
    }
    assert len(found) == 2
    custom = found[1]["function"]
    assert custom["name"] == "apply_patch"
    assert custom["description"].startswith("Edits files.")
    assert "start: begin hunk+ end" in custom["description"]
    assert custom["parameters"]["properties"]["input"]["type"] == "string"
    assert tools.custom_names([READ, PATCH]) == {"apply_patch"}
    assert tools.for_template([{"type": "function", "name": "f"}]) == [{"type": "function", "function": {"name": "f"}}]


def custom_text(arguments: str, cuts: list[int]) -> tuple[str, list[str]]:
    custom = CustomInput()
    places = [0, *sorted(min(cut, len(arguments)) for cut in cuts), len(arguments)]
    pieces = [custom.feed(arguments[a:b]) for a, b in itertools.pairwise(places)]
    pieces.append(custom.finish())
    assert "".join(pieces) == custom.text
    return custom.text, pieces


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40), st.lists(st.integers(0, 120), max_size=8), st.booleans())
def test_a_custom_input_is_the_same_whatever_the_cut(text: str, cuts: list[int], escaped: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=escaped)
    assert custom_text(arguments, cuts)[0] == text


def test_a_custom_input_streams() -> None:
    custom = CustomInput()
    assert custom.feed('{"input": "ab') == "ab"
    assert custom.feed("c\\") == "c"
    assert custom.feed("n\\ud83d") == "\n"
    assert custom.feed("\\ude00") == "😀"
    assert custom.feed('"}') == ""
    assert custom.finish() == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "x"}', "x"),
        ('{"a": 1, "b": "x"}', '{"a": 1, "b": "x"}'),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        ("{}", ""),
        ("", ""),
        ('{"a": "cut o', '{"a": "cut o'),
        ('{"input": "half \\ud83d"}', "half ?"),
    ],
)
def test_calls_of_custom_tools_that_have_not_what_they_should(arguments: str, text: str) -> None:
    for cuts in ([], list(range(len(arguments)))):
        assert custom_text(arguments, cuts)[0] == text


def test_any_number_of_fragments_of_a_call() -> None:
    whole = '{"path": "a.py"}'
    first = CallDelta(0, "", "call_1", "read")
    fragments = [first, *(CallDelta(0, char) for char in whole), CallDelta(1, "{}", "call_2", "read")]
    shown = renderer()
    data = shown.opening + b"".join([shown.pieces([piece]) for piece in fragments])
    events = Events.of((data + shown.finish(Ending("stop", 2)) + shown.closing(COST)).decode())
    deltas = [event["delta"] for event in events.of_type("function_call_arguments.delta")]
    assert deltas == [*whole, "{}"]
    assert [item["arguments"] for item in events.final["output"]] == [whole, "{}"]
    assert [item["call_id"] for item in events.final["output"]] == ["call_1", "call_2"]


def test_a_call_cut_by_the_limit_is_incomplete() -> None:
    shown = renderer(frozenset(["apply_patch"]))
    data = shown.opening + shown.pieces([CallDelta(0, '{"input": "*** Beg', "call_1", "apply_patch")])
    events = Events.of((data + shown.finish(Ending("length", 1)) + shown.closing(COST)).decode())
    (item,) = events.final["output"]
    assert (item["input"], item["status"], events.final["status"]) == ("*** Beg", "incomplete", "incomplete")
    assert events.types[-2:] == ["output_item.done", "incomplete"]


def test_a_call_that_is_done_is_ended_at_once() -> None:
    shown = renderer()
    data = shown.opening + shown.pieces([CallDelta(0, "{}", "call_1", "read", done=True)])
    assert Events.of(data.decode()).types[-1] == "output_item.done"
    events = Events.of((data + shown.finish(Ending("length", 1)) + shown.closing(COST)).decode())
    assert events.final["output"][0]["status"] == "completed", "the limit came behind it"


def test_text_behind_a_call_is_an_item_of_its_own() -> None:
    pieces = [Content("a"), CallDelta(0, "{}", "call_1", "read"), Content("b"), Reasoning("c")]
    whole = json.loads(renderer().whole(pieces, Ending("stop", 1), COST))
    assert [item["type"] for item in whole["output"]] == ["message", "function_call", "message", "reasoning"]


def test_an_answer_of_nothing_has_no_items() -> None:
    shown = renderer()
    events = Events.of((shown.opening + shown.finish(Ending("stop")) + shown.closing(COST)).decode())
    assert events.types == ["created", "in_progress", "completed"]
    assert events.final["output"] == []
