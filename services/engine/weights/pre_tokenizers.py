"""How text is cut into words before byte-level BPE, by llama.cpp's names (`tokenizer.ggml.pre`).

Sources: `llm_tokenizer_bpe` of llama.cpp's src/llama-vocab.cpp, and the `tokenizer.json` of the models named there.
"""

from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    cuts: tuple[str, ...]
    """Regular expressions, one after the other: each match becomes a word of its own."""
    nfc: bool = False
    """Text is brought into Unicode's composed form first (the model's own tokenizer does; llama.cpp leaves it out)."""
    whole_words: bool = False
    """A word that is in the vocabulary is taken as it is, whatever its merges say (`ignore_merges`)."""
    add_bos: bool = False
    """Where the file does not say."""


_LLAMA_BPE = PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True)
_DIGITS_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_QWEN = PreTokenizer((_QWEN2,), nfc=True)

PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((_GPT2,)),
    "olmo": PreTokenizer((_GPT2,)),
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "codeshell": _DIGITS_THEN_GPT2,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "falcon3": PreTokenizer((_LLAMA3,), whole_words=True),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, add_bos=True),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "qwen35": PreTokenizer((_QWEN3_5,), nfc=True),
    "stablelm2": PreTokenizer((_QWEN2,)),
}
