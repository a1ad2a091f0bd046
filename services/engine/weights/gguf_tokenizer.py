"""A tokenizer in GGUF metadata, as a `TokenizerBundle`."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from services.engine.model.config import ModelError
from services.engine.weights.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from services.engine.weights.tokenizer import END_OF_TURN
from services.protocol.events import SpecialTokens, TokenizerBundle

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
"""Of `tokenizer.ggml.token_type`; 1 is a normal token."""
_PADDING = re.compile(r"\[PAD\d+\]")
"""What llama.cpp's converter puts into holes of the vocabulary and rows behind its end: no tokens of the model."""
_SPACE = "▁"  # sentencepiece's
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def read_bundle(metadata: Mapping[str, Any]) -> TokenizerBundle:
    """Raises ModelError naming the key that is missing or not supported."""
    vocabulary = _Vocabulary(metadata)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        pre = _pre_tokenizer(metadata)
        tokenizer = _byte_level(vocabulary, _merges(metadata), pre)
        add_bos = pre.add_bos
    elif kind == "llama":
        prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
        tokenizer = _sentencepiece(vocabulary, _scores(metadata, vocabulary), prefix)
        add_bos = True
    else:
        raise ModelError(f"tokenizer.ggml.model {kind!r} is not supported; known: gpt2, llama")
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "post_processor": None, **tokenizer}
    return TokenizerBundle(
        tokenizer_json=json.dumps(tokenizer, ensure_ascii=False),
        chat_template=metadata.get("tokenizer.chat_template", ""),
        special=_special(metadata, vocabulary, add_bos),
        generation_defaults={
            name: float(metadata[f"general.sampling.{key}"])
            for key, name in _SAMPLING.items()
            if f"general.sampling.{key}" in metadata
        },
    )


class _Vocabulary:
    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens") or ()
        if not self.tokens:
            raise ModelError("metadata tokenizer.ggml.tokens is missing: the file has no tokenizer")
        self.types: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise ModelError(f"tokenizer.ggml.token_type has {len(self.types)} entries for {len(self.tokens)} tokens")
        self.ids: dict[str, int] = {}
        for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind != _UNUSED or not _PADDING.fullmatch(token):
                self.ids.setdefault(token, index)

    def kind(self, token: str) -> int | None:
        index = self.ids.get(token)
        return None if index is None else self.types[index]

    def text(self, index: int | None) -> str | None:
        return self.tokens[index] if index is not None and 0 <= index < len(self.tokens) else None

    def added(self) -> list[dict[str, Any]]:
        """Tokens that are found in raw text before anything else. Control tokens are hidden from the output."""
        return [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != _USER_DEFINED,
            }
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token and self.ids.get(token) == index
        ]


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    name = "gpt-2" if name == "default" else name
    if name not in PRE_TOKENIZERS:
        raise ModelError(f"tokenizer.ggml.pre {name!r} is not supported; known: {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[name]


def _merges(metadata: Mapping[str, Any]) -> list[list[str]]:
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ModelError("metadata tokenizer.ggml.merges is missing")
    pairs = [merge.split(" ") for merge in merges]
    for pair in pairs:
        if len(pair) != 2:
            raise ModelError(f"tokenizer.ggml.merges holds {' '.join(pair)!r}; expected two parts with a space between")
    return pairs


def _byte_level(vocabulary: _Vocabulary, merges: list[list[str]], pre: PreTokenizer) -> dict[str, Any]:
    cuts = [{"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False} for cut in pre.cuts]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "added_tokens": vocabulary.added(),
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, byte_level]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": _model(vocabulary, merges, ignore_merges=pre.whole_words),
    }


def _scores(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Sequence[float]:
    scores = metadata.get("tokenizer.ggml.scores") or ()
    if len(scores) != len(vocabulary.tokens):
        raise ModelError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(vocabulary.tokens)} tokens")
    return scores


def _sentencepiece(vocabulary: _Vocabulary, scores: Sequence[float], prefix: bool) -> dict[str, Any]:
    """As the `tokenizer.json` of Llama 2: BPE over characters, unknown ones spelled in `<0xNN>` bytes."""
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizers: list[dict[str, Any]] = [spaces]
    if prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = next((t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == _UNKNOWN), None)
    model = _model(vocabulary, _implied_merges(vocabulary, scores), unk_token=unknown, fuse_unk=True)
    return {
        "added_tokens": vocabulary.added(),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {**model, "byte_fallback": _BYTE in vocabulary.types},
    }


def _implied_merges(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[list[str]]:
    """Every pair of pieces that makes a piece, best score first: sentencepiece joins by the score of the result."""
    pieces = {
        token: index
        for token, index in vocabulary.ids.items()
        if vocabulary.types[index] not in (_UNKNOWN, _CONTROL, _UNUSED, _BYTE)
    }
    found = []
    for piece, index in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                found.append((-scores[index], -cut, left, right))
    found.sort(key=lambda pair: pair[:2])
    return [[left, right] for *_, left, right in found]


def _model(
    vocabulary: _Vocabulary,
    merges: list[list[str]],
    unk_token: str | None = None,
    fuse_unk: bool = False,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fuse_unk,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary.ids,
        "merges": merges,
    }


def _special(metadata: Mapping[str, Any], vocabulary: _Vocabulary, add_bos: bool) -> SpecialTokens:
    def token_id(name: str) -> int | None:
        return metadata.get(f"tokenizer.ggml.{name}_token_id")

    stops = {stop for name in ("eos", "eot", "eom") if (stop := token_id(name)) is not None}
    stops |= {vocabulary.ids[text] for text in END_OF_TURN if vocabulary.kind(text) == _CONTROL}
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    texts = {key: vocabulary.text(token_id(name)) for key, name in named.items()}
    bos = token_id("bos")
    return SpecialTokens(
        bos_id=bos,
        add_bos=bos is not None and metadata.get("tokenizer.ggml.add_bos_token", add_bos),
        stop_ids=tuple(sorted(stops)),
        tokens={key: text for key, text in texts.items() if text is not None},
    )
