"""The cases that other engines broke on, at every cut that they name, at the parser and through HTTP."""

import json
from typing import Any

import pytest

from services.gateway.output.pieces import CallDelta
from tests.gateway.http_gateway import gateway
from tests.gateway.output_rig import CASES, calls, content, cuts_of, deltas_of, tools
from tests.gateway.test_family_http import both, saying


@pytest.mark.parametrize("name", ["T01", "T02", "T04", "T08"])
def test_calls_at_every_cut(name: str) -> None:
    given, expected = CASES[name]["input"], CASES[name]["expected"]
    for cut in cuts_of(given["model_text"]):
        pieces = deltas_of(cut, tools(**given["tools"]), thinking=given["thinking"])
        assert content(pieces) == expected["content"]
        assert calls(pieces) == expected["tool_calls"]


@pytest.mark.parametrize("name", ["T01", "T02", "T04", "T08"])
async def test_calls_through_http_streamed_and_whole(name: str) -> None:
    given, expected = CASES[name]["input"], CASES[name]["expected"]
    declared = [
        {"type": "function", "function": {"name": tool, "parameters": {"type": "object", "properties": schemas}}}
        for tool, schemas in given["tools"].items()
    ]
    async with gateway(saying(given["model_text"])) as g:
        message, finish, _ = await both(g, tools=declared, enable_thinking=given["thinking"])
        assert (message["content"], finish) == (expected["content"], expected["finish_reason"])
        found = [call["function"] for call in message["tool_calls"]]
        assert [call | {"arguments": json.loads(call["arguments"])} for call in found] == expected["tool_calls"]


def test_two_calls_in_one_delta() -> None:
    case = CASES["T07"]
    deltas = deltas_of(case["input"]["deltas"], tools(**case["input"]["tools"]))
    found = [delta for delta in deltas if isinstance(delta, CallDelta)]
    assert len(found) == len(deltas)
    named = [(delta.index, delta.id, delta.name) for delta in found if delta.id or delta.name]
    assert named == [(0, "call-0", "read"), (1, "call-1", "read")]
    assert [delta.index for delta in found] == sorted(delta.index for delta in found)
    expected = [{key: call[key] for key in ("name", "arguments")} for call in case["expected"]["tool_calls"]]
    assert calls(deltas) == expected


def test_an_answer_cut_off_within_a_call() -> None:
    given = CASES["T11"]["input"]
    for cut in cuts_of(given["model_text"]):
        pieces = deltas_of(cut, tools(**given["tools"]), complete=False)
        assert content(pieces) == CASES["T11"]["expected"]["non_streaming"]["content"]
        assert calls(pieces) == CASES["T11"]["expected"]["non_streaming"]["tool_calls"]
        fragments = "".join(piece.arguments for piece in pieces if isinstance(piece, CallDelta))
        assert fragments == '{"path": "/w/a", "content": "line one\\nline tw'


def test_arguments_keep_the_order_and_the_text_of_the_model() -> None:
    given = CASES["T17"]["input"]
    known: dict[str, Any] = {name: {"type": kind} for name, kind in given["schema"].items()}
    for cut in cuts_of(given["turn1_generated"]):
        deltas = deltas_of(cut, tools(deploy=known))
        (found,) = calls(deltas)
        assert found["arguments"] == json.loads(given["client_echo_turn2"]["tool_calls"][0]["function"]["arguments"])
        assert list(found["arguments"]) == ["opts", "dry_run", "note"]
        (raw,) = [delta.raw for delta in deltas if isinstance(delta, CallDelta) and delta.done]
        assert raw == given["turn1_generated"]
