"""Tool calls in the family's XML form: opaque values, types by the schema, and the same result whatever the cut."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.output.parser import OutputParser
from services.gateway.output.pieces import CallDelta, Content, Piece, Reasoning
from services.gateway.output.token_bytes import TokenBytes
from services.gateway.output.tool_arguments import Tools

CASES = {case["id"]: case for case in json.loads((Path(__file__).parent / "cases.json").read_text())}
BYTES = TokenBytes([bytes([byte]) for byte in range(256)])


def tools(**functions: dict[str, Any]) -> Tools:
    """Tools by name, each with the schemas of its parameters."""
    return Tools(
        [
            {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": schemas}}}
            for name, schemas in functions.items()
        ]
    )


READ = tools(read={"path": {"type": "string"}})


def call(name: str = "read", **parameters: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def parser_of(known: Tools, **options: Any) -> OutputParser:
    ids = itertools.count()
    return OutputParser(BYTES, options.pop("stop", ()), tools=known, call_id=lambda: f"call-{next(ids)}", **options)


def pieces_of(texts: list[str], known: Tools = READ, complete: bool = True, **options: Any) -> list[Piece]:
    """All pieces of an answer whose bytes come in these texts, neighbours of one kind put together."""
    parser = parser_of(known, **options)
    pieces = [piece for text in texts for piece in parser.feed(text.encode())] + parser.finish(complete)
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if isinstance(piece, Content) and isinstance(last, Content):
            merged[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            merged[-1] = Reasoning(last.text + piece.text)
        else:
            merged.append(piece)
    return merged


def cuts_of(text: str) -> list[list[str]]:
    return [[text[at : at + size] for at in range(0, len(text), size)] for size in [*range(1, 10), len(text)]]


def content(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


def calls(pieces: list[Piece]) -> list[dict[str, Any]]:
    return [
        {"name": piece.name, "arguments": json.loads(piece.arguments)}
        for piece in pieces
        if isinstance(piece, CallDelta)
    ]


@pytest.mark.parametrize("case", ["T01", "T02", "T04", "T08"])
def test_cases_of_other_engines_at_every_cut(case: str) -> None:
    given, expected = CASES[case]["input"], CASES[case]["expected"]
    for cut in cuts_of(given["model_text"]):
        pieces = pieces_of(cut, tools(**given["tools"]))
        assert content(pieces) == expected["content"]
        assert calls(pieces) == expected["tool_calls"]


def test_two_calls_in_one_delta() -> None:
    case = CASES["T07"]
    pieces = pieces_of(case["input"]["deltas"], tools(**case["input"]["tools"]))
    found = [piece for piece in pieces if isinstance(piece, CallDelta)]
    assert len(found) == len(pieces)
    assert [
        {"index": piece.index, "name": piece.name, "arguments": json.loads(piece.arguments)} for piece in found
    ] == case["expected"]["tool_calls"]
    assert [piece.id for piece in found] == ["call-0", "call-1"]


def test_an_answer_cut_off_within_a_call_shows_nothing_of_it() -> None:
    given = CASES["T11"]["input"]
    for cut in cuts_of(given["model_text"]):
        assert pieces_of(cut, tools(**given["tools"]), complete=False) == []


@pytest.mark.parametrize(
    "rest", ["\n", "\n<parameter=mode>", "\n<parameter=mode>\nr", "\n</function>", "\n</function>\n</tool_ca"]
)
def test_a_cut_answer_gives_no_call_that_may_lack_something(rest: str) -> None:
    open_call = "<tool_call>\n<function=read>\n<parameter=path>\na\n</parameter>"
    assert pieces_of(["Well.\n\n", open_call, rest], complete=False) == [Content("Well.")]


@pytest.mark.parametrize("rest", ["", "\n", "\n</function>", "\n</function>\n", "\n</tool_call>"])
def test_a_model_that_ends_its_turn_early_has_made_its_call(rest: str) -> None:
    open_call = "<tool_call>\n<function=read>\n<parameter=path>\na\n</parameter>"
    assert calls(pieces_of([open_call, rest])) == [{"name": "read", "arguments": {"path": "a"}}]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\n",
        '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>',
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=read",
        "<tool_call>\n<function=read>\n",
        "<tool_call>\n<function=read>\nfree text\n</function>\n</tool_call>",
        "<tool_call>\n<function=read>\n<parameter=path>\nno end",
        "<tool_call>\n<function=read>\n<parameter=path>\na\n</parameter>\nfree\n</function>\n</tool_call>",
        "<tool_call>\n<function=read>\n<parameter=>\na\n</parameter>\n</function>\n</tool_call>",
        "<function=unknown>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>",
        "<function=read>\n<parameter=path>\na\n</parameter>\n</function>\nis how one writes a call",
        "if a <b and <func or </tool_call> then",
        "ends in <tool_",
        "ends in space  \n",
        "  \n starts so",
    ],
)
def test_what_is_no_call_stays_content_to_the_letter(text: str) -> None:
    for cut in cuts_of(text):
        assert pieces_of(cut) == [Content(text)]


def test_a_call_after_what_is_none() -> None:
    text = f"<tool_call>\nhm <tool_call>\n{call(path='a')}"
    assert pieces_of([text]) == [
        Content("<tool_call>\nhm <tool_call>"),
        CallDelta(0, '{"path": "a"}', "call-0", "read"),
    ]


def test_space_around_calls_belongs_to_them() -> None:
    text = f"First.\n\n{call(path='a')}\n \n{call(path='b')}\n\nThen  \n"
    for cut in cuts_of(text):
        pieces = pieces_of(cut)
        assert [type(piece) for piece in pieces] == [Content, CallDelta, CallDelta, Content]
        assert [piece.text for piece in pieces if isinstance(piece, Content)] == ["First.", "Then  \n"]


def test_a_call_without_parameters_and_one_of_an_unknown_tool() -> None:
    pieces = pieces_of([call(), call("Raed", path="a")])
    assert calls(pieces) == [{"name": "read", "arguments": {}}, {"name": "Raed", "arguments": {"path": "a"}}]


def test_without_tools_calls_are_text() -> None:
    text = call(path="a")
    assert pieces_of([text], tools()) == [Content(text)]


def test_content_goes_out_before_the_call_is_whole() -> None:
    parser = parser_of(READ)
    assert parser.feed(b"Look: <too") == [Content("Look:")]
    assert parser.feed(b"thless> ") == [Content(" <toothless>")]
    assert parser.feed(b"now\n\n<tool_call>\n<fun") == [Content(" now")]
    assert parser.feed(b"ction=read>\n</function>\n") == []
    assert parser.feed(b"</tool_call>") == [CallDelta(0, "{}", "call-0", "read")]
    assert parser.calls == 1


def test_stop_strings_are_looked_for_in_content_only() -> None:
    text = f"a\n{call(path='one STOP two')}\n"
    pieces = pieces_of([text, "b STOP c"], stop=["STOP"])
    assert content(pieces) == "ab "
    assert calls(pieces) == [{"name": "read", "arguments": {"path": "one STOP two"}}]
    # Nor does one reach over a call.
    assert content(pieces_of(["ST", call(), "OP"], stop=["STOP"])) == "STOP"


def test_thoughts_hold_no_calls() -> None:
    text = f"I could {call(path='a')}\n</think>\n\n{call(path='b')}"
    for cut in cuts_of(text):
        pieces = pieces_of(cut, thinking=True)
        assert pieces[0] == Reasoning(f"I could {call(path='a')}")
        assert calls(pieces) == [{"name": "read", "arguments": {"path": "b"}}]
        assert len(pieces) == 2


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_text_gives_the_same_whatever_the_cut(data: st.DataObject) -> None:
    tags = ["<tool_call>", "</tool_call>", "<function=read>", "</function>", "<parameter=path>", "</parameter>"]
    parts = st.sampled_from([*tags, "<think>", "</think>", "\n", " ", "x", "ä", "<", "</", "stop", call(path="v")])
    text = "".join(data.draw(st.lists(parts, max_size=16)))
    options = {
        "stop": data.draw(st.sampled_from([(), ("xstop",), ("<", "\n\n")])),
        "thinking": data.draw(st.booleans()),
        "complete": data.draw(st.booleans()),
    }
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    cut = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    assert pieces_of(cut, **options) == pieces_of([text], **options)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.text("x<>/=\n é", max_size=12), min_size=1), st.data())
def test_values_come_through_to_the_letter(values: dict[str, str], data: st.DataObject) -> None:
    known = tools(f={name: {"type": "string"} for name in values})
    text = call("f", **values)
    size = data.draw(st.integers(1, len(text)))
    cut = [text[at : at + size] for at in range(0, len(text), size)]
    assert calls(pieces_of(cut, known)) == [{"name": "f", "arguments": values}]


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
    arguments = known.arguments("f", {"p": text})
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
    arguments = known.arguments("f", {"p": text})
    assert arguments.encode()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert list(json.loads(arguments, parse_constant=refuse)) == ["p"]


@pytest.mark.parametrize("depth", [100, 900, 950, 980, 1000, 5000])
def test_nesting_of_any_depth(depth: int) -> None:
    text = "[" * depth + "]" * depth
    arguments = tools(f={"p": {"type": "array"}}).arguments("f", {"p": text})
    assert arguments in (f'{{"p": {text}}}', f'{{"p": "{text}"}}')


@pytest.mark.parametrize("parameters", [None, [], {"properties": []}, {"properties": {"p": None}}])
def test_a_tool_with_an_odd_schema_can_be_called(parameters: Any) -> None:
    known = Tools([{"function": {"name": "f", "parameters": parameters}}])
    assert json.loads(known.arguments("f", {"p": "text"})) == {"p": "text"}


def test_a_long_value_is_read_once() -> None:
    """A file of 200 KiB full of what begins like a closing tag, a few bytes a token; were it read again from its
    start for each of them, this would take minutes."""
    value = "</parameter> </param\n" * 10_000
    text = call(path=value)
    pieces = pieces_of([text[at : at + 7] for at in range(0, len(text), 7)])
    assert calls(pieces) == [{"name": "read", "arguments": {"path": value}}]
