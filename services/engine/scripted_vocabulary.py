"""The scripted engine's text side: 256 bytes and the special tokens of the ChatML family."""

import json
import re
from collections.abc import Sequence

from services.protocol.events import SpecialTokens, TokenizerBundle

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens of their own, but text: a decoder shows them."""

VOCABULARY: tuple[bytes, ...] = (
    *(bytes([value]) for value in range(256)),
    *(name.encode() for name in (*_SPECIAL, *_MARKS)),
)
"""What each id stands for."""

ENDOFTEXT, IM_START, IM_END = 256, 257, 258

_ID_OF = {name: token for token, name in enumerate(VOCABULARY)}
_NAMES = re.compile(b"|".join(re.escape(name) for name in sorted(VOCABULARY[256:], key=len, reverse=True)))

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'Tools:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + (message.content or '') + '\\n</tool_response><|im_end|>\\n' }}
{%- elif not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""Tool results are user turns, as in Qwen's template: a script can answer them too."""


def encode(text: bytes) -> tuple[int, ...]:
    """Ids of `text`; where a special token's name occurs it becomes that token."""
    ids: list[int] = []
    start = 0
    for match in _NAMES.finditer(text):
        ids += text[start : match.start()]
        ids.append(_ID_OF[match.group()])
        start = match.end()
    ids += text[start:]
    return tuple(ids)


def prompt_text(prompt: Sequence[int]) -> str:
    """All of a prompt, special tokens by their names. Ids out of the vocabulary are passed over."""
    return b"".join(VOCABULARY[token] for token in prompt if token < len(VOCABULARY)).decode(errors="replace")


def last_user_message(prompt: Sequence[int]) -> str:
    """The text of the last user turn; all of a prompt that has none. Ids out of the vocabulary are passed over."""
    text = "".join([chr(token) for token in prompt if token < len(VOCABULARY)])  # a character an id: `find` is fast
    opening = chr(IM_START) + "user\n"
    start = text.rfind(opening)
    if start >= 0:
        start += len(opening)
        end = text.find(chr(IM_END), start)
        text = text[start : end if end >= 0 else None]
    return b"".join(VOCABULARY[ord(character)] for character in text).decode(errors="replace")


def scripted_bundle() -> TokenizerBundle:
    """The tokenizer as the gateway loads it: byte-level BPE that merges nothing, and a ChatML template."""
    vocabulary = {character: value for value, character in enumerate(_byte_level_alphabet())}
    added = [
        {
            "id": token,
            "content": VOCABULARY[token].decode(),
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token in (ENDOFTEXT, IM_START, IM_END),
        }
        for token in range(256, len(VOCABULARY))
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary | {VOCABULARY[token].decode(): token for token in range(256, len(VOCABULARY))},
            "merges": [],
        },
    }
    return TokenizerBundle(
        tokenizer_json=json.dumps(tokenizer),
        chat_template=CHAT_TEMPLATE,
        special=SpecialTokens(
            stop_ids=(IM_END, ENDOFTEXT),
            tokens={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        ),
    )


def _byte_level_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's `bytes_to_unicode`): printable
    Latin-1 stands for itself, the rest for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(value) if value in printable else chr(next(others)) for value in range(256)]
