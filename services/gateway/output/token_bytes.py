"""The bytes that each token id stands for: one table per tokenizer, so that detokenizing is a lookup.

A tokenizer's own `decode` looks at the whole text again for each token and hides half characters; bytes do not.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from services.gateway.output.structure import CLOSE_CALL, OPEN_CALL
from services.gateway.output.thoughts import CLOSE, OPEN

_TAGS = (OPEN, CLOSE, OPEN_CALL, CLOSE_CALL)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"
"""How sentencepiece writes a space."""


class TokenBytes:
    """token id -> bytes of its text. Immutable; may be shared between threads."""

    __slots__ = ("_table",)

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = tuple(table)

    @classmethod
    def from_tokenizer_json(cls, tokenizer_json: str, silent: Iterable[int] = ()) -> "TokenBytes":
        """Read a file of the `tokenizers` library (0.3 s for 250,000 tokens).

        Byte-level BPE is undone with the GPT-2 byte map; sentencepiece vocabularies with `<0xNN>` tokens and the word
        start mark. Special added tokens and the ids of `silent` (those that end a turn) give no text, but for the tags
        that the parser of the output reads; other added tokens give theirs. The space in front of a sentencepiece
        answer's first word is kept, because the answer goes on from a prompt. Raises ValueError for a file without a
        vocabulary.
        """
        spec = msgspec.json.decode(tokenizer_json)
        model = spec.get("model") or {}
        vocab = model.get("vocab")
        if not vocab:
            raise ValueError("the tokenizer has no vocabulary")
        if isinstance(vocab, dict):
            words: dict[int, str] = {id: word for word, id in vocab.items()}
        else:  # Unigram: [[word, score], ...]
            words = {id: entry[0] for id, entry in enumerate(vocab)}
        added = {token["id"]: token for token in spec.get("added_tokens") or ()}
        table = [b""] * (max([*words, *added]) + 1)
        convert = _byte_level if _uses(spec.get("decoder"), "ByteLevel") else _sentencepiece
        for id, word in words.items():
            table[id] = convert(word)
        for id, token in added.items():
            hidden = token.get("special") and token["content"] not in _TAGS
            table[id] = b"" if hidden else token["content"].encode()
        for id in silent:
            if 0 <= id < len(table):
                table[id] = b""
        return cls(table)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, id: int) -> bytes:
        """Empty for an id outside the vocabulary (a model's padded rows)."""
        return self._table[id] if 0 <= id < len(self._table) else b""

    def join(self, ids: Iterable[int]) -> bytes:
        """The bytes of a run of tokens."""
        table = self._table
        try:
            return b"".join([table[id] for id in ids])
        except IndexError:
            return b"".join([self[id] for id in ids])


def _uses(decoder: Any, kind: str) -> bool:
    """Whether a decoder of tokenizer.json is, or as a sequence contains, one of this type."""
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == kind or any(_uses(part, kind) for part in decoder.get("decoders") or ())


def _byte_map() -> dict[str, int]:
    """GPT-2's `bytes_to_unicode`, inverted: printable bytes stand for themselves, the others for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(rest)}


_BYTE_OF = _byte_map()


def _byte_level(word: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in word])
    except KeyError:  # a word that was put into the vocabulary as plain text
        return word.encode()


def _sentencepiece(word: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(word)
    if byte:
        return bytes([int(byte[1], 16)])
    return word.replace(_WORD_START, " ").encode()
