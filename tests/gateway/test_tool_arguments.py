"""The values of a call's parameters: types by the schema, and strings that are given while they are written."""

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.tool_stream import long_call
from services.gateway.output.pieces import CallDelta, Piece
from services.gateway.output.tool_arguments import Tools
from tests.gateway.output_rig import READ, call, calls, content, parser_of, pieces_of, random_cut, tools


def arguments_of(known: Tools, text: str) -> str:
    """The arguments of a call of `f` with `text` as its parameter `p`, which is the same streamed and whole."""
    whole = call("f", p=text)
    (piece,) = pieces_of([whole], known)
    assert isinstance(piece, CallDelta)
    assert piece.done
    assert pieces_of(random_cut(whole, random.Random(text)), known) == [piece]
    return piece.arguments


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "-7", -7),
        ({"type": "integer"}, "1e3", 1000),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "1e999999999", "1e999999999"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "number"}, "0.1", 0.1),
        ({"type": "number"}, "1e" + "9" * 30, "1e" + "9" * 30),
        ({"type": "number"}, "1e-" + "9" * 30, "1e-" + "9" * 30),
        ({"type": "integer"}, "12345678901234567890123456789012345.0", 12345678901234567890123456789012345),
        ({"type": "object"}, '{"half": "\\ud83d"}', {"half": "\ud83d"}),
        ({"type": "number"}, "1e400", "1e400"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "object"}, "{'a': 1}", "{'a': 1}"),
        ({"type": "object"}, "[1]", "[1]"),
        ({"type": "array"}, "[NaN]", "[NaN]"),
        ({"type": "array"}, "[1e400]", "[1e400]"),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"type": "array", "items": {}}, ' [1, "a"] ', [1, "a"]),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", "None"),
        ({"type": ["string", "integer"]}, "03106", "03106"),
        ({"type": ["string", "integer"]}, "42", 42),
        ({"anyOf": [{"type": "string"}]}, "true", "true"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": True}, "True", True),
        ({"$ref": "#/$defs/Count"}, "3", 3),
        ({"$ref": "#/$defs/Round"}, "3", 3),
        ({}, "plain", "plain"),
        ({}, '{"a": [1]}', {"a": [1]}),
        ({}, '"quoted"', '"quoted"'),
        (True, "1", 1),
    ],
)
def test_types_follow_the_schema(schema: Any, text: str, value: Any) -> None:
    known = Tools(
        [
            {
                "function": {
                    "name": "f",
                    "parameters": {
                        "properties": {"p": schema},
                        "$defs": {"Count": {"type": "integer"}, "Round": {"$ref": "#/$defs/Round"}},
                    },
                }
            }
        ]
    )
    arguments = arguments_of(known, text)
    assert arguments.encode()
    assert json.loads(arguments) == {"p": value}
    assert type(json.loads(arguments)["p"]) is type(value)


_KINDS = st.sampled_from(["string", "null", "boolean", "integer", "number", "array", "object", "odd"])
_SCHEMAS = st.one_of(
    st.none(),
    st.builds(lambda kind: {"type": kind}, _KINDS),
    st.builds(lambda kinds: {"type": kinds}, st.lists(_KINDS)),
    st.builds(lambda kinds: {"anyOf": [{"type": kind} for kind in kinds]}, st.lists(_KINDS)),
)
_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


@settings(deadline=None)
@given(_SCHEMAS, st.one_of(st.text("0123456789.-+eE ", max_size=12), st.text(max_size=12), _JSON.map(json.dumps)))
def test_whatever_a_model_writes_becomes_json(schema: Any, text: str) -> None:
    known = tools(f={"p": schema})
    arguments = arguments_of(known, text)
    assert arguments.encode()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert list(json.loads(arguments, parse_constant=refuse)) == ["p"]


@pytest.mark.parametrize("depth", [100, 900, 950, 980, 1000, 5000])
def test_nesting_of_any_depth(depth: int) -> None:
    text = "[" * depth + "]" * depth
    arguments = arguments_of(tools(f={"p": {"type": "array"}}), text)
    assert arguments in (f'{{"p": {text}}}', f'{{"p": "{text}"}}')
    for form in ('{"name": "f", "arguments": {"p": %s}}', '<function=f>{"p": %s}</function>'):
        pieces = pieces_of(["<tool_call>", form % text, "</tool_call>"], tools(f={}))
        assert text in content(pieces) or calls(pieces)[0]["arguments"]["p"]


@pytest.mark.parametrize("parameters", [None, [], {"properties": []}, {"properties": {"p": None}}])
def test_a_tool_with_an_odd_schema_can_be_called(parameters: Any) -> None:
    known = Tools([{"function": {"name": "f", "parameters": parameters}}])
    assert json.loads(arguments_of(known, "text")) == {"p": "text"}


def fed(text: str, known: Tools, head: str = "<tool_call>\n<function=f>\n<parameter=p>\n") -> list[str]:
    """What each character of a value adds to the arguments."""
    parser = parser_of(known)
    parser.feed(head.encode())
    return [_arguments(parser.feed(char.encode())) for char in text]


def _arguments(pieces: Sequence[Piece]) -> str:
    return "".join(piece.arguments for piece in pieces if isinstance(piece, CallDelta))


def test_the_name_comes_when_the_function_tag_closes() -> None:
    parser = parser_of(READ)
    assert parser.feed(b"<tool_call>\n<function=read") == []
    assert parser.feed(b">") == [CallDelta(0, "", "call-0", "read")]
    assert parser.feed(b"\n<parameter=path>\n") == [CallDelta(0, '{"path": ')]
    assert parser.feed(b"a.") == [CallDelta(0, '"a.')]
    assert parser.feed(b"py\n</parameter>\n</function>\n") == [CallDelta(0, "py")]
    raw = "<tool_call>\n<function=read>\n<parameter=path>\na.py\n</parameter>\n</function>\n</tool_call>"
    assert parser.feed(b"</tool_call>") == [CallDelta(0, '"}', done=True, raw=raw)]


def test_a_string_is_given_character_by_character() -> None:
    assert fed('a"\té\\', tools(f={"p": {"type": "string"}})) == ['"a', '\\"', "\\t", "é", "\\\\"]


def test_only_what_may_be_a_closing_tag_is_held_back() -> None:
    string = tools(f={"p": {"type": "string"}})
    assert fed("a\nb\n\nc", string) == ['"a', "", "\\nb", "", "\\n", "\\nc"]
    assert fed("a</parb", string) == ['"a', "", "", "", "", "", "</parb"]
    assert fed("a</i>", string) == ['"a', "", "", "</i", ">"]
    assert fed("</parameter> x", string)[-2:] == ["", '"</parameter> x']
    assert fed("</tool_call>\nx", string)[-2:] == ["", '"</tool_call>\\nx']
    assert fed("<parameter=q>x", string)[-2:] == ['"<parameter=q>', "x"]


def test_a_value_that_may_be_null_waits_only_while_it_may() -> None:
    known = tools(f={"p": {"anyOf": [{"type": "null"}, {"type": "string"}]}})
    assert fed("null and", known) == ["", "", "", "", "", '"null a', "n", "d"]
    assert fed("x", known) == ['"x']
    assert fed(" nu", known) == ["", "", ""]


@pytest.mark.parametrize("schema", [{"type": "integer"}, {"type": ["string", "integer"]}, {}, {"type": "object"}])
def test_other_types_come_when_they_are_complete(schema: dict) -> None:
    assert set(fed("12345 some words", tools(f={"p": schema}))) == {""}


@settings(deadline=None)
@given(
    st.sampled_from([["string"], ["string", "null"], ["string", "boolean"], ["null", "string", "boolean"]]),
    st.one_of(st.sampled_from(["null", "true", " false\n", "nul", "None"]), st.text("null true\n", max_size=8)),
)
def test_what_is_streamed_is_what_the_whole_text_means(kinds: list[str], text: str) -> None:
    value = json.loads(arguments_of(tools(f={"p": {"type": kinds}}), text))["p"]
    word = text.strip()
    if "null" in kinds and word == "null":
        assert value is None
    elif "boolean" in kinds and word in ("true", "false"):
        assert value is (word == "true")
    else:
        assert value == text


def test_the_largest_gap_within_a_long_string_is_three_tokens() -> None:
    """Counted in tokens, without the machine's own time (which `python -m bench tool-stream` measures)."""
    value, tokens = long_call()
    parser = parser_of(tools(write_file={name: {"type": "string"} for name in ("path", "content")}))
    given = [place for place, token in enumerate(tokens) if _arguments(parser.feed(token.encode()))]
    inside = [place for place in given if place > tokens.index("=content")][:-1]  # the last one closes it
    assert len(value) == 4000
    assert len(inside) > 1000
    assert max(later - earlier for earlier, later in itertools.pairwise(inside)) <= 3
