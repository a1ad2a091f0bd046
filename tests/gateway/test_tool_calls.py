"""Tool calls in the family's XML form: opaque values, types by the schema, and the same result whatever the cut."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.output.pieces import CallDelta, Content, Piece, Reasoning
from tests.gateway.output_rig import READ, call, calls, content, cuts_of, parser_of, pieces_of, reasoning, tools


@pytest.mark.parametrize("rest", ["\n", "\n<parameter=mode>", "\n<parameter=mode>\nr", "\n</function>"])
def test_a_cut_answer_gives_no_call_that_may_lack_something(rest: str) -> None:
    open_call = "<tool_call>\n<function=read>\n<parameter=path>\na\n</parameter>"
    pieces = pieces_of(["Well.\n\n", open_call, rest], complete=False)
    assert content(pieces) == "Well."
    assert calls(pieces) == []


@pytest.mark.parametrize(
    "text", ["<tool_call>", "<tool_call>\n<function=re", '<tool_call>\n{"name": "re', "<function=read>"]
)
def test_no_tags_are_shown_where_an_answer_is_cut(text: str) -> None:
    assert pieces_of(["Well.\n\n", text], complete=False) == [Content("Well.")]


@pytest.mark.parametrize("rest", ["", "\n", "\n</function>", "\n</function>\n", "\n</tool_call>"])
def test_a_model_that_ends_its_turn_early_has_made_its_call(rest: str) -> None:
    open_call = "<tool_call>\n<function=read>\n<parameter=path>\na\n</parameter>"
    assert calls(pieces_of([open_call, rest])) == [{"name": "read", "arguments": {"path": "a"}}]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\n",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=read",
        "<function=unknown>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>",
        "<function=read>\n<parameter=path>\na\n</parameter>\n</function>\nis how one writes a call",
        "<function=read>\n<parameter=path>\nno end",
        "<function=read>",
        "Write <function=read>\n<parameter=path>\na\n</parameter>\n</function>",
        "Write <tool_call>\n<function=NAME>\n</function>\n</tool_call>",
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call> is how',
        'So: <tool_call>{"name": "read", "arguments": {}}</tool_call>',
        '<tool_call>\n{"name": "read"}\n</tool_call>',
        '<tool_call>\n{"name": "read", "arguments": {',
        f"Like so:\n```xml\n{call(path='a')}\n```\nSee?",
        f"~~~\n{call(path='a')}\n\n{call(path='b')}\n~~~",
        f"Like `{call(path='a')}`.",
        "```\n<function=read>\n<parameter=path>\na\n</parameter>\n</function>\n```",
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
        CallDelta(0, '{"path": "a"}', "call-0", "read", True, call(path="a")),
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
    assert parser.feed(b"ction=read>\n</function>\n") == [CallDelta(0, "", "call-0", "read")]
    raw = "<tool_call>\n<function=read>\n</function>\n</tool_call>"
    assert parser.feed(b"</tool_call>") == [CallDelta(0, "{}", done=True, raw=raw)]
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


FUNCTION = "<function=read>\n<parameter=path>\na\n</parameter>\n</function>"
HERMES = '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"Well.\n\n{FUNCTION}", "Well."),
        (f"Well.\n\n{FUNCTION}\n</tool_call>\nSo", "Well.So"),
        (HERMES, ""),
        (f"Well.\n{HERMES}\nSo", "Well.So"),
        ('<tool_call>{"arguments": "{\\"path\\": \\"a\\"}", "name": "read"}', ""),
        ('<tool_call>\n{"name": "read", "parameters": {"path": "a"}}', ""),
        ('<tool_call>\n<function=read>\n{"path": "a"}\n</function>\n</tool_call>', ""),
        ("<tool_call>\n<function=read>\n<parameter=path>\na", ""),
        ("<tool_call>\n<function=read>\n<parameter=path>\na\n</function>\n</tool_call>", ""),
        ("<tool_call>\n<function=read>\n<parameter=path>\na\n</tool_call>", ""),
        ("<tool_call>\n<function=read>\nfree\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>", "free\n"),
        (f"```\nx\n```\n{call(path='a')}", "```\nx\n```"),
        (f"A fence that is never closed:\n```\n{call(path='a')}", "A fence that is never closed:\n```"),
        ("<tool_call><function=read><parameter=path>a</parameter></function></tool_call>", ""),
    ],
)
def test_drift_is_a_call_all_the_same(text: str, shown: str) -> None:
    for cut in cuts_of(text):
        pieces = pieces_of(cut)
        assert calls(pieces) == [{"name": "read", "arguments": {"path": "a"}}]
        assert content(pieces) == shown


@pytest.mark.parametrize(
    "text",
    [
        f"{FUNCTION}\n{FUNCTION.replace('read', 'list')}",
        f"<tool_call>\n{FUNCTION}\n{FUNCTION.replace('read', 'list')}\n</tool_call>",
        f"<tool_call>\n{FUNCTION[:-12]}\n<tool_call>\n{FUNCTION.replace('read', 'list')}",
        f"<tool_call>\n{FUNCTION}\n<tool_call>\n{FUNCTION.replace('read', 'list')}\n</tool_call>",
        f"{HERMES}\n{HERMES.replace('read', 'list')}",
        "<tool_call>\n<function=read>\n<parameter=path>\na\n</tool_call>\n<tool_call>\n<function=list>\n"
        "<parameter=path>\na",
    ],
)
def test_two_calls_that_drifted(text: str) -> None:
    known = tools(read={"path": {"type": "string"}}, list={"path": {"type": "string"}})
    for cut in cuts_of(text):
        pieces = pieces_of(cut, known)
        assert calls(pieces) == [{"name": name, "arguments": {"path": "a"}} for name in ("read", "list")]
        assert content(pieces) == ""


def test_a_parameter_that_is_not_closed_ends_where_another_begins() -> None:
    known = tools(edit={"old": {"type": "string"}, "new": {"type": "string"}, "all": {"type": "boolean"}})
    text = (
        "<tool_call>\n<function=edit>\n<parameter=old>\na <parameter=new>\n<parameter=odd>\n<parameter=old>\nb\n"
        "<parameter=new>\nc\n<parameter=all>\nTrue\n</function>\n</tool_call>"
    )
    arguments = {"old": "a <parameter=new>\n<parameter=odd>\n<parameter=old>\nb", "new": "c", "all": True}
    for cut in cuts_of(text):
        assert calls(pieces_of(cut, known)) == [{"name": "edit", "arguments": arguments}]


@pytest.mark.parametrize("end", ["", "\n", "\n</think>", "\n</think>\n\n"])
def test_a_call_within_the_thoughts_that_ends_the_turn(end: str) -> None:
    text = f"I need it.\n\n{call(path='a')}\n{call(path='b')}{end}"
    for cut in cuts_of(text):
        pieces = pieces_of(cut, thinking=True)
        assert [found["arguments"]["path"] for found in calls(pieces)] == ["a", "b"]
        assert (reasoning(pieces), content(pieces)) == ("I need it.", "")


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        (f"Hm {call(path='a')} hm", True),
        (f"Hm {call('unknown', path='a')}", True),
        (f"Hm {call(path='a')}", False),
        ("Hm\n<tool_call>\n<function=read>\n<parameter=path>\na", True),
    ],
)
def test_other_thoughts_stay_thoughts(text: str, complete: bool) -> None:
    for cut in cuts_of(text):
        assert pieces_of(cut, complete=complete, thinking=True) == [Reasoning(text)]


def test_ids_and_indexes_of_parallel_calls() -> None:
    deltas: Iterator[Piece] = iter(pieces_of([call(path="a"), "\n", call(path="a"), call(path="a")]))
    assert [(d.index, d.id) for d in deltas if isinstance(d, CallDelta)] == [(n, f"call-{n}") for n in range(3)]


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


def test_a_long_value_is_read_once() -> None:
    """A file of 200 KiB full of what begins like a closing tag, a few bytes a token; were it read again from its
    start for each of them, this would take minutes."""
    value = "</parameter> </param\n" * 10_000
    text = call(path=value)
    pieces = pieces_of([text[at : at + 7] for at in range(0, len(text), 7)])
    assert calls(pieces) == [{"name": "read", "arguments": {"path": value}}]
