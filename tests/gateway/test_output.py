"""Token ids to text: byte tables, UTF-8 across tokens, stop strings; every cut gives the same result."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.gateway.output.parser import OutputParser
from services.gateway.output.pieces import Content, Piece
from services.gateway.output.stop_strings import StopStrings
from services.gateway.output.token_bytes import TokenBytes
from tests.gateway.fake_engines import END, START, tokenizer_json

CASES = {case["id"]: case for case in json.loads((Path(__file__).parent / "cases.json").read_text())}
BYTES = TokenBytes([bytes([byte]) for byte in range(256)])


def parse(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], OutputParser]:
    """Deltas of byte tokens fed in these pieces; the end is the last delta where no stop string came before."""
    parser = OutputParser(BYTES, stop)
    deltas = [text_of(parser.feed(piece)) for piece in pieces]
    return [*deltas, text_of(parser.finish())], parser


def text_of(pieces: list[Piece]) -> str:
    """Of an answer that is content only."""
    texts = [piece.text for piece in pieces if isinstance(piece, Content)]
    assert len(texts) == len(pieces)
    return "".join(texts)


@st.composite
def cuts(draw: st.DrawFn, data: bytes) -> list[bytes]:
    places = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def test_utf8_case_of_other_engines() -> None:
    case = CASES["T12"]
    table = TokenBytes([bytes.fromhex(token) for token in case["input"]["token_bytes_hex"]])
    parser = OutputParser(table)
    assert [text_of(parser.feed([id])) for id in range(len(table))] == case["expected"]["deltas"]
    assert parser.finish() == []


def test_a_half_character_at_the_end_is_one_replacement() -> None:
    deltas, _ = parse([b"ok \xf0", b"\x9f\x98"])
    assert deltas == ["ok ", "", "\ufffd"]


@settings(deadline=None)
@given(st.data())
def test_bytes_become_text_as_the_whole_would_whatever_the_cut(data: st.DataObject) -> None:
    raw = data.draw(st.one_of(st.binary(max_size=40), st.text(max_size=20).map(lambda t: t.encode())))
    deltas, parser = parse(data.draw(cuts(raw)))
    assert "".join(deltas) == raw.decode("utf-8", "replace")
    assert parser.consumed == len(raw)


@settings(deadline=None)
@given(st.text(max_size=20), st.data())
def test_no_delta_ends_within_a_character(text: str, data: st.DataObject) -> None:
    deltas, _ = parse(data.draw(cuts(text.encode())))
    assert all("\ufffd" not in delta for delta in deltas) or "\ufffd" in text


@pytest.mark.parametrize("variant", CASES["T13"]["input"]["variants"])
def test_stop_string_case_of_other_engines(variant: dict) -> None:
    tokens = variant.get("deltas") or variant["one_accepted_block"]
    table = TokenBytes([token.encode() for token in tokens])
    parser = OutputParser(table, CASES["T13"]["input"]["stop"])
    ids = range(len(tokens))
    fed = [parser.feed([id]) for id in ids] if "deltas" in variant else [parser.feed(ids)]
    deltas = [text_of(pieces) for pieces in [*fed, parser.finish()]]
    assert "".join(deltas) == CASES["T13"]["expected"]["text"]
    assert all("own" not in delta for delta in deltas)
    assert parser.stopped
    assert parser.consumed == (3 if "deltas" in variant else 5)


def test_only_a_prefix_of_a_stop_string_is_held_back() -> None:
    stops = StopStrings(["own fox"])
    assert stops.feed("The quick br") == ("The quick br", False)
    assert stops.feed("own") == ("", False)
    assert stops.feed("er") == ("owner", False)
    assert stops.feed(" own") == (" ", False)
    assert stops.release() == "own"


@pytest.mark.parametrize(
    ("stops", "text", "before"),
    [
        (["aab"], "aaab", "a"),  # a naive restart after the mismatch would miss it
        (["abab"], "abacababx", "abac"),
        (["bc", "abcd"], "abcd", "a"),  # what ends first wins
        (["c", "abc"], "xabc", "x"),  # of those that end together the longest
        (["\n\nUser:", "\n\n"], "hi\n\nUser:", "hi"),
        (["é"], "cafés", "caf"),
    ],
)
def test_which_stop_string_wins(stops: list[str], text: str, before: str) -> None:
    assert StopStrings(stops).feed(text) == (before, True)


def _expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition, slowly: the match with the least end, of those the one with the least start."""
    matches = [(end, end - len(s)) for s in stops for end in range(len(text) + 1) if text[:end].endswith(s)]
    if not matches:
        return text, False
    return text[: min(matches)[1]], True


@settings(deadline=None)
@given(
    st.text("ab€", max_size=16),
    st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=4),
    st.data(),
)
def test_stop_strings_whatever_the_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    deltas, parser = parse(data.draw(cuts(text.encode())), tuple(stops))
    expected, stopped = _expected(text, stops)
    assert "".join(deltas) == expected
    assert parser.stopped == stopped
    # The count does not depend on how tokens were merged either.
    assert parser.consumed == parse([bytes([byte]) for byte in text.encode()], tuple(stops))[1].consumed


def test_byte_level_table_equals_the_tokenizers_own_decoder() -> None:
    spec = tokenizer_json()
    table, tokenizer = TokenBytes.from_tokenizer_json(spec), Tokenizer.from_str(spec)
    text = "naïve — 世界 😊\n\ttab"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(table) == 258
    assert table.join(ids).decode() == text == tokenizer.decode(ids)
    assert (table[START], table[END], table[258], table[9999]) == (b"", b"", b"", b"")
    assert table.join([104, 9999, 105]) == b"hi"


def test_sentencepiece_table_and_added_tokens() -> None:
    spec = {
        "model": {
            "type": "BPE",
            "vocab": {
                "<unk>": 0,
                "</s>": 1,
                "<0xE4>": 2,
                "<0xB8>": 3,
                "<0x96>": 4,
                "▁hello": 5,
                "▁▁x": 6,
                "<think>": 7,
            },
            "merges": [],
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "added_tokens": [
            {"id": 1, "content": "</s>", "special": True},
            {"id": 7, "content": "<think>", "special": False},
        ],
    }
    table = TokenBytes.from_tokenizer_json(json.dumps(spec))
    assert table.join([7, 5, 6, 2, 3, 4, 1]) == "<think> hello  x世".encode()


def test_the_tags_of_the_output_are_text_even_where_a_file_calls_them_special() -> None:
    names = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>")
    added = [{"id": id, "content": name, "special": True} for id, name in enumerate(names)]
    table = TokenBytes.from_tokenizer_json(json.dumps({"model": {"vocab": {"a": 5}}, "added_tokens": added}))
    assert table.join(range(6)) == b"<think></think><tool_call></tool_call>a"


def test_unigram_vocabulary_and_silent_ids() -> None:
    spec = {"model": {"type": "Unigram", "vocab": [["▁a", 0.0], ["END", -1.0]]}, "decoder": {"type": "Metaspace"}}
    table = TokenBytes.from_tokenizer_json(json.dumps(spec), silent=[1, 77])
    assert table.join([0, 1]) == b" a"


def test_a_tokenizer_without_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="no vocabulary"):
        TokenBytes.from_tokenizer_json("{}")
