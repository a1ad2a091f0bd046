"""Which of a model's tokens stand for a message that came back: as many as say what the message says, and no other
text."""

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.gateway.output.parser import OutputParser
from services.gateway.output.pieces import Content, Reasoning
from services.gateway.output.token_bytes import TokenBytes
from services.gateway.prompt.template import ChatTemplate
from services.gateway.prompt.written_answer import (
    WrittenAnswer,
    content_digest,
    thoughts_digest,
    written_answer,
)
from services.gateway.sessions.records import AnswerRecord, CallRecord
from services.protocol.generate import pack_ids
from tests.gateway.fake_engines import tokenizer_json

LEAD = "<|im_start|>assistant\n<think>\n"


@cache
def one_byte_each() -> TokenBytes:
    return TokenBytes.from_tokenizer_json(tokenizer_json())


def read(data: bytes) -> tuple[str, str]:
    """Thoughts and content as a client is given them."""
    parser = OutputParser(one_byte_each(), thinking=True)
    pieces = [*parser.feed(list(data)), *parser.finish()]
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return thoughts, "".join(piece.text for piece in pieces if isinstance(piece, Content))


def record(data: bytes, whole: bool = False) -> AnswerRecord:
    thoughts, content = read(data)
    return AnswerRecord(
        id="r",
        place=b"",
        language="l",
        lead=LEAD,
        thinking=True,
        whole=whole,
        thoughts=thoughts_digest(thoughts),
        content=content_digest(content),
        ids=pack_ids(list(data)),
    )


def found(records: Sequence[AnswerRecord], content: str, thoughts: str | None = None) -> WrittenAnswer | None:
    message = {"role": "assistant", "content": content if content.strip() else ""}
    if thoughts is not None:
        message["reasoning_content"] = thoughts
    return written_answer(message, records, {}, one_byte_each())


def written(answer: WrittenAnswer) -> tuple[str, str]:
    return read(bytes(answer.ids) + answer.rest.encode())


texts = st.text(alphabet="ab <\n\t/é😀", max_size=12)


@given(texts, texts, st.booleans(), st.booleans(), st.booleans(), st.data())
def test_no_other_text(
    thoughts: str, content: str, whole: bool, drops: bool, strips: bool, data: st.DataObject
) -> None:
    raw = f"{thoughts}\n</think>\n\n{content}".encode()
    given_thoughts, given_content = read(raw)
    sent = given_content[: data.draw(st.integers(0, len(given_content)))]
    sent = sent.strip() if strips else sent
    answer = found([record(raw, whole)], sent, None if drops else given_thoughts.strip() if strips else given_thoughts)
    assert answer is not None
    if answer.open:  # nothing of the answer was heard, and not all of the thoughts' white space
        assert not sent.strip()
        assert written(answer)[0].strip() == given_thoughts.strip()
        return
    back_thoughts, back_content = written(answer)
    assert back_thoughts == given_thoughts
    assert back_content.strip() == sent.strip()
    if whole and sent.strip() == given_content.strip():
        assert bytes(answer.ids) == raw


@given(texts, st.booleans(), st.data())
def test_thoughts_that_broke_off(thoughts: str, closed: bool, data: st.DataObject) -> None:
    raw = (thoughts + ("\n</think>\n\nWell." if closed else "")).encode()
    given_thoughts, _ = read(raw)
    sent = given_thoughts[: data.draw(st.integers(0, len(given_thoughts)))]
    answer = found([record(raw)], "", sent)
    if not sent.strip():
        assert answer is None or not answer.open
        return
    assert answer is not None
    assert written(answer)[0].strip() in (sent.strip(), given_thoughts.strip() if answer.thoughts else "")
    if answer.open:
        assert (bytes(answer.ids) + answer.rest.encode()).decode().strip() == sent.strip()
        assert len(answer.rest) == 0, "each token is a byte, so none ends within what was sent"


@pytest.mark.parametrize(
    ("content", "thoughts"),
    [("Well!", "Hm."), ("Well.", "Hm!"), ("Well. More", None), ("ell.", None), ("", "Hm?"), ("Well", "Other.")],
)
def test_another_text_is_the_clients(content: str, thoughts: str | None) -> None:
    for whole in (True, False):
        assert found([record(b"Hm.\n</think>\n\nWell.", whole)], content, thoughts) is None


def test_of_several_answers() -> None:
    """The newest one that is the whole message, else the one with most of it."""
    first, second = record(b"One.\n</think>\n\nWell.", True), record(b"Two.\n</think>\n\nWell.", True)
    third = record(b"Three.\n</think>\n\nWell then.", True)
    for content, thoughts, ids in (
        ("Well.", None, b"Two.\n</think>\n\nWell."),
        ("Well.", "One.", b"One.\n</think>\n\nWell."),
        ("Well t", None, b"Three.\n</think>\n\nWell t"),
        ("We", "Two.", b"Two.\n</think>\n\nWe"),
    ):
        answer = found([first, second, third], content, thoughts)
        assert answer is not None
        assert bytes(answer.ids) == ids
    assert found([first, second, third], "Well.", "Three.") is None
    assert found([], "Well.") is None


def test_more_came_than_was_heard() -> None:
    """The record of an answer under way has all ids, and digests of what was read of them."""
    raw = b"Hm, well then.\n</think>\n\nDone."
    behind = replace(record(raw), thoughts=thoughts_digest("Hm, well"), content=b"")
    answer = found([behind], "", "Hm, well")
    assert answer is not None
    assert (answer.open, bytes(answer.ids)) == (True, b"Hm, well")
    answer = found([behind], "Do", "Hm, well then.")
    assert answer is not None
    assert (answer.open, bytes(answer.ids)) == (False, raw[:-3])


def answer(ids: Sequence[int] = (1, 2), *, lead: str = LEAD, **fields: object) -> WrittenAnswer:
    return WrittenAnswer(lead, ids, "", **{"thoughts": True, "open": False, **fields})  # type: ignore[arg-type]


SHOWS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}"
    "\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{{ '<|im_start|>assistant\n<think>\n' }}"
)
HIDES = SHOWS.replace("m.reasoning_content %}", "false %}")
REPEATS = SHOWS.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}")
TELLS = SHOWS.replace("<|im_start|>{{ m.role }}", "<|im_start|>{{ m.role }} no. {{ loop.index }}")
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]


def test_where_a_template_shows_what_was_generated() -> None:
    template = ChatTemplate(SHOWS, {})
    head, tail = "<|im_start|>user\na<|im_end|>\n", "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n" + LEAD
    assert template.parts(CHAT, answers={1: answer()}) == [head + LEAD, (1, 2), tail]
    closed = f"{LEAD}\n</think>\n\n"
    assert template.parts(CHAT, answers={1: answer(lead=closed)}) == [head + closed, (1, 2), tail]
    assert template.parts(CHAT, answers={1: answer(lead="<|im_start|>assistant\n")}) == [
        head + "<|im_start|>assistant\n",
        (1, 2),
        tail,
    ]
    broken_off = template.parts(CHAT, answers={1: answer(open=True)})
    assert broken_off == [head + LEAD, (1, 2), "\n</think>\n\nb" + tail]
    assert template.parts(CHAT, answers={1: answer([])}) == [head + LEAD + tail], "no token of it was taken"


@pytest.mark.parametrize("source", [HIDES, REPEATS, TELLS])
@pytest.mark.parametrize("broken_off", [True, False])
def test_where_it_does_not_the_template_has_its_way(source: str, broken_off: bool) -> None:
    template = ChatTemplate(source, {})
    if source is REPEATS and broken_off:
        return  # thoughts alone are shown once
    assert template.parts(CHAT, answers={1: answer(open=broken_off)}) == template.parts(CHAT)


def test_what_is_hidden_at_one_place_is_shown_at_another() -> None:
    template = ChatTemplate(SHOWS.replace("m.reasoning_content %}", "m.reasoning_content and loop.index > 2 %}"), {})
    chat = [*CHAT, {"role": "assistant", "content": "d"}]
    parts = template.parts(chat, answers={1: answer((1,)), 3: answer((2,))})
    assert parts == [template.render(CHAT).removesuffix(LEAD) + LEAD, (2,), "<|im_end|>\n" + LEAD]


def test_a_call_that_is_not_known_any_more() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": "1"}}}
    message = {"role": "assistant", "content": "Well.", "tool_calls": [call]}
    one = replace(record(b"Hm.\n</think>\n\nWell.", True), calls=("c",))
    read_out = CallRecord("c", "l", "f", '{"a": "1"}', "<tool_call></tool_call>")
    known = written_answer(message, [one], {"c": read_out}, one_byte_each())
    assert known is not None
    assert known.calls == (read_out,)
    assert written_answer(message, [one], {}, one_byte_each()) is None
    changed = {"c": replace(read_out, arguments='{"a": "2"}')}
    assert written_answer(message, [one], changed, one_byte_each()) is None
