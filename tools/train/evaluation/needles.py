"""The prompt of the public needle test (cache-pressure)."""

import random

from tokenizers import Tokenizer

from tools.train.tasks.wording import ANIMALS, EMPTY_THOUGHT, PANGRAMS, QUESTION


def needle_case(tokenizer: Tokenizer, tokens: int, salt: int, depth: float = 0.8) -> tuple[str, str]:
    """A prompt of about `tokens` tokens with a code at `depth` of its text, and the code."""
    rng = random.Random(4242 + salt)
    code = f"{rng.choice(ANIMALS)}-{rng.randrange(1000, 9999)}"
    tokens_per_character = len(tokenizer.encode(haystack(20_000, 9999)).ids) / 20_000
    text = haystack(int(tokens / tokens_per_character), salt)
    at = int(len(text) * depth)
    prompt = (
        "<|im_start|>system\nYou are a careful reader.<|im_end|>\n"
        f"<|im_start|>user\n{text[:at]}\n[the secret code is {code}]\n{text[at:]}\n\n{QUESTION}<|im_end|>\n"
        f"<|im_start|>assistant\n{EMPTY_THOUGHT}"
    )
    return prompt, code


def haystack(characters: int, salt: int) -> str:
    rng = random.Random(7919 + salt)
    words: list[str] = []
    length = 0
    while length < characters:
        word = rng.choice(PANGRAMS)
        words.append(word)
        length += len(word) + 1
    return " ".join(words)[:characters]
