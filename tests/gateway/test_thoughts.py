"""Thoughts and answer told apart: where they start, which newlines go, which tokens count; at every cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.output.parser import OutputParser
from services.gateway.output.pieces import Content, Reasoning
from services.gateway.output.token_bytes import TokenBytes

OPEN, CLOSE = 256, 257
TABLE = TokenBytes([*(bytes([byte]) for byte in range(256)), b"<think>", b"</think>"])


def parse(text: str, thinking: bool, size: int = 1, stop: tuple[str, ...] = ()) -> tuple[str, str, OutputParser]:
    """Thoughts, content and the parser, of a text fed `size` bytes at a time."""
    parser = OutputParser(TABLE, stop, thinking=thinking)
    data = text.encode()
    pieces = [piece for at in range(0, len(data), size) for piece in parser.feed(data[at : at + size])]
    pieces += parser.finish()
    thoughts = [piece.text for piece in pieces if isinstance(piece, Reasoning)]
    content = [piece.text for piece in pieces if isinstance(piece, Content)]
    assert all([*thoughts, *content])
    return "".join(thoughts), "".join(content), parser


@pytest.mark.parametrize("size", [1, 3, 8, 1000])
@pytest.mark.parametrize(
    ("text", "thinking", "thoughts", "content"),
    [
        ("Hm.\n</think>\n\nYes", True, "Hm.", "Yes"),
        ("Hm.</think>Yes", True, "Hm.", "Yes"),
        ("Hm.\n\n</think>\n\n\nYes", True, "Hm.\n", "\nYes"),
        ("\n</think>\n\nYes", True, "", "Yes"),
        ("</think>Yes", True, "", "Yes"),
        ("Hm.\n</think>\n", True, "Hm.", ""),
        ("a</thin b\n</thinker> c</think>d", True, "a</thin b\n</thinker> c", "d"),
        ("Hm.\n</think>\n\nNot </think> again <think>", True, "Hm.", "Not </think> again <think>"),
        ("<think>Hm.\n</think>\n\nYes", True, "<think>Hm.", "Yes"),
        ("no end\n", True, "no end\n", ""),
        ("no end\n</thi", True, "no end\n</thi", ""),
        ("<think>\nHm.\n</think>\n\nYes", False, "Hm.", "Yes"),
        ("\n <think>Hm.</think>Yes", False, "Hm.", "Yes"),
        ("<think>\n\n</think>\n\nYes", False, "", "Yes"),
        ("<thin ice", False, "", "<thin ice"),
        ("<thi", False, "", "<thi"),
        (" \n", False, "", " \n"),
        ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
        ("\n\nYes", False, "", "\n\nYes"),
        ("", True, "", ""),
    ],
)
def test_thoughts_and_content(text: str, thinking: bool, thoughts: str, content: str, size: int) -> None:
    assert parse(text, thinking, size)[:2] == (thoughts, content)


def test_reasoning_tokens_are_those_up_to_the_closing_tag() -> None:
    parser = OutputParser(TABLE, thinking=True)
    parser.feed([*b"ab\n", CLOSE, *b"\n\nYes"])
    assert (parser.reasoning_tokens, parser.consumed) == (4, 9)
    opened = OutputParser(TABLE)
    opened.feed([OPEN, *b"\nab\n", CLOSE, *b"Yes"])
    assert (opened.reasoning_tokens, opened.consumed) == (6, 9)
    none = OutputParser(TABLE)
    none.feed(b"Yes")
    assert (none.reasoning_tokens, none.consumed) == (0, 3)


def test_thoughts_go_out_as_they_come() -> None:
    parser = OutputParser(TABLE, thinking=True)
    assert parser.feed(b"I wonder") == [Reasoning("I wonder")]
    assert parser.feed(b"\n</thi") == []
    assert parser.feed(b"ng") == [Reasoning("\n</thing")]


def test_a_stop_string_ends_no_thought() -> None:
    thoughts, content, parser = parse("a STOP b\n</think>\n\nc STOP d", True, stop=("STOP",))
    assert (thoughts, content, parser.stopped) == ("a STOP b", "c ", True)
    assert parser.consumed == len("a STOP b\n</think>\n\nc STOP")


@settings(deadline=None)
@given(st.lists(st.sampled_from(["<think>", "</think>", "\n", "a", "é", "<", "</think", " "]), max_size=12), st.data())
def test_every_cut_gives_the_same(parts: list[str], data: st.DataObject) -> None:
    text, thinking = "".join(parts), data.draw(st.booleans())
    whole = parse(text, thinking, max(1, len(text.encode())))
    cut = parse(text, thinking, data.draw(st.integers(1, 9)))
    assert cut[:2] == whole[:2]
    assert (cut[2].reasoning_tokens, cut[2].consumed) == (whole[2].reasoning_tokens, whole[2].consumed)
