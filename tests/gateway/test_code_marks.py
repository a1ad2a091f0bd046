"""Which places of a Markdown text are code, whatever the cut of the text."""

import pytest

from services.gateway.output.code_marks import CodeMarks


@pytest.mark.parametrize(
    ("text", "in_code"),
    [
        ("", False),
        ("plain", False),
        ("a `b", True),
        ("a `b` c", False),
        ("a `b\nc", False),
        ("```", True),
        ("```py\ncode\n", True),
        ("```py\ncode\n```", True),  # the line may go on
        ("```py\ncode\n```\n", False),
        ("  ~~~\ncode\n```\n", True),
        ("~~~\ncode\n~~~\n", False),
        ("````\n```\ncode\n```\n", True),
        ("````\n```\n````\n", False),
        ("```md\n```py\n", True),
        ("```md\n```py\n```\n", False),
        ("a ``` b ```\n", False),
        (f"{'x' * 100}```\n", False),
    ],
)
def test_code(text: str, in_code: bool) -> None:
    for size in (1, 2, 3, 1000):
        marks = CodeMarks()
        for at in range(0, len(text), size):
            marks.feed(text[at : at + size])
        assert marks.in_code is in_code


@pytest.mark.parametrize(
    ("text", "at_start"), [("", True), ("a\n", True), ("a\n \t", True), ("a", False), ("\na ", False)]
)
def test_line_starts(text: str, at_start: bool) -> None:
    marks = CodeMarks()
    assert marks.after(text).at_line_start is at_start
    marks.feed(text)
    assert marks.at_line_start is at_start
