"""Text folders -> a data folder: tokenizer.json, token files (uint16), words.txt, sizes.json."""

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tools.train.data.corpus import ENGLISH, PYTHON, gather, is_held_out
from tools.train.data.dataset import TextKind
from tools.train.data.vocabulary import END_OF_TEXT, check_tokenizer, train_tokenizer
from tools.train.tasks.wording import wording_samples

WORD = re.compile(r"(?<![\w.])[a-z]{3,10}(?![\w(])")
WORDS = 9000


def prepare(
    python: Sequence[Path],
    english: Sequence[Path],
    out: Path,
    tokenizer_file: Path | None,
    vocab_size: int,
    characters: int,
) -> None:
    """Writes the folder `out`; the same files and arguments write the same bytes. `characters` bounds each of the two
    kinds. Without a tokenizer file a new tokenizer is trained, which fits no model that exists.

    Raises FileNotFoundError for a missing folder, ValueError for too little text or a tokenizer of another size."""
    out.mkdir(parents=True, exist_ok=True)
    texts: dict[TextKind, list[str]] = {
        "python": gather(python, replace(PYTHON, total_characters=characters)),
        "english": gather(english, replace(ENGLISH, total_characters=characters)),
    }
    for kind, found in texts.items():
        print(f"{kind}: {len(found)} files, {sum(map(len, found)) / 1e6:.2f} MB")
    if tokenizer_file:
        tokenizer = Tokenizer.from_str(tokenizer_file.read_text())
        check_tokenizer(tokenizer, vocab_size)
        shutil.copyfile(tokenizer_file, out / "tokenizer.json")
    else:
        rng = random.Random(3)
        sample = [text for found in texts.values() for text in rng.sample(found, len(found) // 2)]
        tokenizer = train_tokenizer([*sample, wording_samples(rng)], vocab_size)
        tokenizer.save(str(out / "tokenizer.json"))

    sizes: dict[str, dict[str, int]] = {}
    for kind, found in texts.items():
        for split in ("train", "held"):
            part = [text for text in found if is_held_out(text) == (split == "held")]
            if not part:
                raise ValueError(f"{kind}: no text for the split {split!r}; give more folders")
            ids = tokens_of(part, tokenizer)
            np.save(out / f"{kind}.{split}.npy", ids)
            sizes[f"{kind}.{split}"] = {"tokens": len(ids), "bytes": sum(len(text.encode()) for text in part)}
    counts = Counter(word for text in texts["english"] for word in WORD.findall(text))
    words = [word for word, count in counts.most_common(WORDS) if count >= 4]
    if len(words) < 200:
        raise ValueError(f"only {len(words)} common words in the English text; give more folders")
    (out / "words.txt").write_text("\n".join(words) + "\n")
    (out / "sizes.json").write_text(json.dumps(sizes, indent=1) + "\n")
    print(f"{len(words)} words; {json.dumps(sizes)}")


def tokens_of(texts: list[str], tokenizer: Tokenizer) -> np.ndarray:
    """uint16: each text and the end-of-text token after it."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    parts: list[np.ndarray] = []
    for first in range(0, len(texts), 64):
        for encoding in tokenizer.encode_batch(texts[first : first + 64], add_special_tokens=False):
            parts.append(np.array([*encoding.ids, end], dtype=np.uint16))
    return np.concatenate(parts)
