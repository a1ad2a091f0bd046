"""The tokenizer: byte-level BPE with the family's pre-tokenizer and added tokens."""

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ADDED_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
"""The last ids of the vocabulary, in this order; only the first SPECIAL of them are "special", as in the family."""
SPECIAL = 3
END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"

# Single digits, one leading non-letter joined to a word, newlines kept together.
PRE_TOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly vocab_size ids, added tokens included. Raises ValueError if the texts are too few."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(ADDED_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ADDED_TOKENS[:SPECIAL]])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ADDED_TOKENS[SPECIAL:]])
    check_tokenizer(tokenizer, vocab_size)
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ValueError unless the vocabulary has this size and ends with ADDED_TOKENS."""
    found = tokenizer.get_vocab_size()
    if found != vocab_size:
        raise ValueError(f"the tokenizer has {found} ids, the model has {vocab_size}")
    first = vocab_size - len(ADDED_TOKENS)
    for index, token in enumerate(ADDED_TOKENS, first):
        if tokenizer.token_to_id(token) != index:
            raise ValueError(f"the tokenizer gives {token} the id {tokenizer.token_to_id(token)}, expected {index}")
